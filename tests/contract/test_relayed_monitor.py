"""A QEMU's monitor that another program relays: errors, descriptors, events, and their order."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import libvirt
import pytest

from vmckpt.epoch.disks import DisksAtOnce
from vmckpt.errors import HostDownError, OutcomeUnknownError
from vmckpt.hosts.local import LocalHost
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Json, MonitorLostError
from vmckpt.qemu.relayed import FIRST_FDSET, MOST_FDSETS, RelayedMonitor
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.monitor import DomainRelay
from vmckpt.vm.paths import QemuDir

pytestmark = pytest.mark.contract


class Relay:
    """Answers commands by a script: a reply, an error, or nothing."""

    def __init__(self, **answers: object) -> None:
        self.answers, self.is_open = answers, True
        self.asked: list[tuple[str, Any]] = []
        self.files: list[str] = []

    async def execute(
        self, command: str, arguments: Json | None, fd: int | None, timeout_s: float | None
    ) -> str:
        self.asked.append((command, arguments))
        if fd is not None:
            self.files.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        answer = self.answers.get(command.replace("-", "_"), {})
        if isinstance(answer, Exception):
            raise answer
        return (
            answer if isinstance(answer, str) else json.dumps({"return": answer, "id": "libvirt-7"})
        )

    async def reopen(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False


def monitor(**answers: object) -> tuple[RelayedMonitor, Relay]:
    relay = Relay(**answers)
    return RelayedMonitor(relay, "dom on a"), relay


def test_answers_refusals_and_silence_are_told_apart() -> None:
    async def main() -> None:
        refused = json.dumps({"error": {"class": "GenericError", "desc": "no such node"}})
        silent = HostDownError("libvirtd did not answer", why="it ended", remedy="start it")
        one, _ = monitor(
            query_status={"running": True, "status": "running"},
            blockdev_del=refused,
            query_version="{",
            query_jobs=silent,
            stop=silent,
            getfd=silent,
        )
        assert (await commands.query_status(one)).running
        with pytest.raises(CommandRefusedError, match="dom on a refused blockdev-del") as caught:
            await one.tell("blockdev-del", {"node-name": "n"})
        assert caught.value.description == "no such node"
        with pytest.raises(MonitorLostError):
            await commands.query_version(one)
        with pytest.raises(MonitorLostError) as lost:
            await commands.query_jobs(one)
        assert "it ended" in lost.value.why
        for told in (commands.stop(one), one.give_fd("fd", 0), commands.migrate_pause(one)):
            with pytest.raises(OutcomeUnknownError):
                await told

    asyncio.run(main())


def test_descriptors_go_along_in_sets_that_are_ours_and_are_taken_back() -> None:
    async def main() -> None:
        sets = [
            {"fdset-id": 0},
            {"fdset-id": FIRST_FDSET + 1},
            {"fdset-id": FIRST_FDSET + MOST_FDSETS},
        ]
        one, relay = monitor(query_fdsets=sets)
        fd = os.open("/dev/null", os.O_RDONLY)
        try:
            assert [await one.add_fd(fd), await one.add_fd(fd)] == [FIRST_FDSET, FIRST_FDSET + 1]
            await one.give_fd("name", fd)
        finally:
            os.close(fd)
        assert relay.files == ["/dev/null"] * 3
        assert relay.asked[-1] == ("getfd", {"fdname": "name"})
        await one.forget_fds()
        removed = [arguments for command, arguments in relay.asked if command == "remove-fd"]
        assert removed == [{"fdset-id": FIRST_FDSET + 1}]

    asyncio.run(main())


def test_events_reach_those_who_asked_for_them() -> None:
    async def main() -> None:
        one, _ = monitor()
        with one.events("RESET") as resets, one.events("STOP", "RESET") as both:
            one.receive("STOP", "")
            one.receive("RESET", '{"guest": true, "reason": "guest-reset"}')
            one.receive("RESET", "{")  # malformed: left out
            first = await resets.next(1.0)
            assert first is not None
            assert dict(first) == {
                "event": "RESET",
                "data": {"guest": True, "reason": "guest-reset"},
            }
            assert [event["event"] for event in both.drain()] == ["STOP", "RESET"]
        one.receive("RESET", "")
        assert resets.drain() == []

    asyncio.run(main())


def test_a_lent_qemu_gets_descriptors_for_its_disks_files(tmp_path: Path) -> None:
    """Its user may not reach vmckpt's files, and its process may see other directories."""

    async def main() -> None:
        node = {
            "node-name": "libvirt-1-format",
            "image": {"filename": "/i", "virtual-size": 1 << 20},
        }
        drive = {
            "device": "",
            "qdev": "/machine/peripheral/virtio-disk0/virtio-backend",
            "inserted": {"node-name": "libvirt-1-format"},
        }
        one, relay = monitor(
            query_named_block_nodes=[node],
            query_block=[drive],
            query_commands=[{"name": "blockdev-set-active"}],
        )
        files = QemuDir(tmp_path, "u", "1")
        disks = DisksAtOnce(one, files)
        await disks.prepare(["libvirt-1-format"], "b", None)
        added = [words for command, words in relay.asked if command == "blockdev-add"]
        assert added[0]["file"]["filename"] == f"/dev/fdset/{FIRST_FDSET}"
        assert relay.files == [str(files.old_blocks(0))]
        async with disks.served() as path:
            assert ("getfd", {"fdname": "vmckpt-disks"}) in relay.asked
            start = [words for command, words in relay.asked if command == "nbd-server-start"]
            assert start == [{"addr": {"type": "fd", "data": {"str": "vmckpt-disks"}}}]
            assert relay.files[-1].startswith("socket:")
            assert path.is_socket()
        assert not path.exists()

    asyncio.run(main())


class LibvirtDomain:
    """libvirt's own objects, for one domain."""

    def __init__(self, state: DomainState) -> None:
        self.now, self.calls = state, list[str]()

    def lookupByUUIDString(self, uuid: str) -> "LibvirtDomain":  # noqa: N802
        return self

    def state(self) -> tuple[int, int]:
        return int(self.now), 1

    def suspend(self) -> None:
        self.calls.append("suspend")
        self.now = DomainState.PAUSED

    def resume(self) -> None:
        if self.now is DomainState.RUNNING:
            raise libvirt.libvirtError("domain is already running")
        self.calls.append("resume")
        self.now = DomainState.RUNNING


def test_pauses_are_libvirts_and_marked_while_they_last(tmp_path: Path) -> None:
    """What libvirt says of the domain stays true, and whoever comes next can end a pause."""

    async def main() -> None:
        mark = tmp_path / "saving"
        relay = DomainRelay("test:///default", LocalHost("a", tmp_path, "::1"), "u", mark)
        relay._connection = domain = LibvirtDomain(DomainState.RUNNING)
        one = RelayedMonitor(relay, "dom on a")
        await commands.cont(one)  # it runs: QEMU does not mind either
        assert domain.calls == []
        await commands.stop(one)
        assert (domain.calls, mark.exists()) == (["suspend"], True)
        await commands.cont(one)
        assert (domain.calls, mark.exists()) == (["suspend", "resume"], False)

    asyncio.run(main())


def test_commands_are_executed_in_the_order_of_their_tasks(tmp_path: Path) -> None:
    """A pause's commands are sent together: none may overtake the stop."""

    async def main() -> None:
        relay = DomainRelay("test:///default", LocalHost("a", tmp_path, "::1"), "u", tmp_path / "m")
        relay._connection = domain = LibvirtDomain(DomainState.RUNNING)
        one = RelayedMonitor(relay, "dom on a")
        for _ in range(20):
            domain.calls.clear()
            orders = commands.stop(one), commands.cont(one), commands.stop(one)
            await asyncio.gather(*map(asyncio.ensure_future, orders))
            assert domain.calls == ["suspend", "resume", "suspend"]
            await commands.cont(one)

    asyncio.run(main())


def test_a_relay_that_has_ended_is_opened_again_and_one_that_is_open_is_not() -> None:
    async def main() -> None:
        one, relay = monitor()
        relay.reopen = pytest.fail  # type: ignore[method-assign]
        await one.reopen()
        ended, relay = monitor()
        relay.is_open = False
        await ended.reopen()
        assert ended.is_open

    asyncio.run(main())


def test_a_set_of_descriptors_has_words() -> None:
    """Libvirt 11.3 ended in query-fdsets, whose answer had none, when it saved the domain."""

    async def main() -> None:
        one, relay = monitor()
        await one.add_fd(0)
        ((command, arguments),) = relay.asked
        assert (command, arguments["opaque"]) == ("add-fd", "vmckpt")

    asyncio.run(main())
