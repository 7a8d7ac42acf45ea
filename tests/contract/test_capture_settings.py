"""What a QEMU is told before its devices alone are saved, and afterwards."""

from typing import Any

import pytest

from tests.scripted_qmp import Server, play
from vmckpt.epoch.capture import CAPABILITIES, PARAMETERS, saving
from vmckpt.qemu.monitor import Monitor

pytestmark = pytest.mark.contract

LEFT = {
    "x-ignore-shared": False,
    "events": True,
    "return-path": True,
    "multifd": True,
    "rdma": False,
}


def test_what_an_earlier_migration_left_on_is_off_meanwhile() -> None:
    now, seen = dict(LEFT), list[dict[str, bool]]()

    async def script(server: Server) -> None:
        try:
            while True:
                command = await server.command()
                arguments: dict[str, Any] = command.get("arguments", {})
                match command["execute"]:
                    case "query-migrate-capabilities":
                        listed = [{"capability": name, "state": on} for name, on in now.items()]
                        await server.answer(command, listed)
                    case "migrate-set-capabilities":
                        given = {
                            one["capability"]: one["state"] for one in arguments["capabilities"]
                        }
                        now.update(given)
                        await server.answer(command, {})
                    case "query-migrate-parameters":
                        await server.answer(command, dict.fromkeys(PARAMETERS, 0))
                    case _:
                        await server.answer(command, {})
        except EOFError:
            return

    async def client(monitor: Monitor) -> None:
        async with saving(monitor, CAPABILITIES, PARAMETERS):
            seen.append(dict(now))

    play(script, client)
    assert seen == [LEFT | CAPABILITIES | {"multifd": False}]
    assert now == LEFT
