"""Plugging in and out, against a scripted monitor: what is waited for, and what is believed."""

import asyncio
from typing import Any

import pytest

from tests.scripted_qmp import Script, Server, play
from vmckpt.errors import OperationFailedError, TimedOutError
from vmckpt.qemu import hotplug
from vmckpt.qemu.hotplug import UnplugRefusedError
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.passthrough.passthrough import Passthrough, Strategy
from vmckpt.vm.passthrough.plug import plug_one

CARD = ["gpu0", "gpu0-1"]
GPU = Passthrough("gpu0", "vfio-pci", "10de:2330", Strategy.HOOK_DETACH, "/h", 0, {}, {})


class Guest:
    """Devices, and what becomes of a request to let one go."""

    def __init__(self, *ids: str, delays: int = 0, does: str = "lets go") -> None:
        self.ids, self.delays, self.does = list(ids), delays, does
        self.asked: list[dict[str, Any]] = []
        self.refused_add = ""

    def script(self) -> Script:
        async def serve(server: Server) -> None:
            try:
                while True:
                    await self.answer(server, await server.command())
            except EOFError:
                return

        return serve

    async def answer(self, server: Server, command: dict[str, Any]) -> None:
        arguments = command.get("arguments", {})
        match command["execute"]:
            case "qom-list":
                await self.progress(server)
                found = [{"name": name, "type": "child<vfio-pci>"} for name in self.ids]
                await server.answer(command, found)
            case "device_del":
                self.asked.append(command)
                if self.does == "was asked before":
                    text = f"Device {arguments['id']} is already in the process of unplug"
                    await server.refuse(command, text)
                elif self.does == "QEMU refuses":
                    await server.refuse(command, "Bus 'x' does not support hotplugging")
                else:
                    if arguments["id"] not in self.ids:
                        await server.refuse(command, "not found")
                        return
                    await server.answer(command, {})
                    if self.does == "guest refuses":
                        data = {"device": arguments["id"], "path": "/x"}
                        event = {"event": "DEVICE_UNPLUG_GUEST_ERROR", "data": data}
                        await server.send(event | {"timestamp": {"seconds": 1, "microseconds": 0}})
                    if self.does == "never shown":
                        self.ids.remove(arguments["id"])
            case "device_add":
                self.asked.append(command)
                if arguments["id"] == self.refused_add:
                    await server.refuse(command, "vfio 0000:41:00.0: group 12 is not viable")
                else:
                    self.ids.append(arguments["id"])
                    await server.answer(command, {})

    async def progress(self, server: Server) -> None:
        """All functions go, one after the other, some looks after the guest was asked."""
        if not self.asked or self.does not in ("lets go", "was asked before"):
            return
        if self.delays:
            self.delays -= 1
        elif self.ids:
            name = self.ids.pop()
            data = {"device": name, "path": f"/machine/peripheral/{name}"}
            event = {"event": "DEVICE_DELETED", "data": data}
            await server.send(event | {"timestamp": {"seconds": 1, "microseconds": 0}})


def unplug(guest: Guest, timeout_s: float = 10.0) -> None:
    async def client(monitor: Monitor) -> None:
        await hotplug.unplug(monitor, CARD, timeout_s)

    play(guest.script(), client)


@pytest.mark.parametrize("does", ["lets go", "was asked before"])
def test_the_calls_return_means_nothing(does: str) -> None:
    guest = Guest(*CARD, delays=1, does=does)
    unplug(guest)
    assert guest.ids == []
    assert [command["arguments"]["id"] for command in guest.asked] == ["gpu0"]


def test_what_is_gone_is_not_asked_for() -> None:
    guest = Guest("other")
    unplug(guest)
    assert (guest.asked, guest.ids) == ([], ["other"])


@pytest.mark.parametrize("does", ["QEMU refuses", "guest refuses"])
def test_a_refusal_ends_the_waiting(does: str) -> None:
    with pytest.raises(UnplugRefusedError):
        unplug(Guest(*CARD, does=does), timeout_s=60.0)


def test_a_silent_guest_is_given_up() -> None:
    with pytest.raises(TimedOutError) as error:
        unplug(Guest(*CARD, does="nothing"), timeout_s=0.05)
    assert "gpu0, gpu0-1 is still there" in error.value.why


def test_function_0_comes_last_and_all_come_or_none() -> None:
    guest = Guest(does="never shown")

    async def client(monitor: Monitor) -> None:
        await plug_one(_host(), monitor, GPU, ["0000:41:00.0", "0000:41:00.1"])

    play(guest.script(), client)
    assert guest.ids == ["gpu0-1", "gpu0"]

    guest = Guest(does="never shown")
    guest.refused_add = "gpu0"
    with pytest.raises(OperationFailedError) as error:
        play(guest.script(), client)
    assert "group 12 is not viable" in error.value.why
    assert guest.ids == []


def _host() -> Any:
    class Named:
        name = "a"

    return Named()


def test_events_of_others_are_not_heeded() -> None:
    """Another device's refusal says nothing of this one."""
    guest = Guest(*CARD, delays=1)

    async def script(server: Server) -> None:
        data = {"device": "disk1", "path": "/x"}
        event = {"event": "DEVICE_UNPLUG_GUEST_ERROR", "data": data}
        command = await server.command()
        await server.send(event | {"timestamp": {"seconds": 1, "microseconds": 0}})
        await guest.answer(server, command)
        await guest.script()(server)

    async def client(monitor: Monitor) -> None:
        await asyncio.wait_for(hotplug.unplug(monitor, CARD, 10.0), 15)

    play(script, client)
    assert guest.ids == []
