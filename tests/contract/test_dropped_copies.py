"""The copies of a cut-off migration are taken out of a QEMU that is busy at first."""

import asyncio
from pathlib import Path

from tests.scripted_qmp import Server, play
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.outcome.ends import End
from vmckpt.migrate.steps.disks import drop_mirrors
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.paths import VmDir

NODE = "copy-r1-0"


class Scripted(End):
    """A QEMU that lives, with one monitor for everything."""

    def __init__(self, monitor: Monitor, directory: Path) -> None:
        super().__init__(LocalHost("a", directory, "127.0.0.1"), VmDir(directory).qemu("0123abcd"))
        self._only = monitor

    async def alive(self) -> bool:
        return True

    async def monitor(self) -> Monitor:
        return self._only

    async def rescue(self) -> Monitor:
        return self._only


def test_a_node_in_use_is_closed_when_it_is_free(tmp_path: Path) -> None:
    deletions: list[str] = []
    nodes = [
        {
            "node-name": NODE,
            "drv": "nbd",
            "file": "",
            "ro": False,
            "image": {"filename": "", "virtual-size": 0},
        }
    ]

    async def busy(server: Server) -> None:
        try:
            while True:
                command = await server.command()
                match command.get("execute") or command["exec-oob"]:
                    case "query-yank" | "query-jobs":
                        await server.answer(command, [])
                    case "query-status":
                        await server.answer(command, {"status": "running", "running": True})
                    case "query-named-block-nodes":
                        await server.answer(command, nodes)
                    case "blockdev-del":
                        deletions.append(command["arguments"]["node-name"])
                        if len(deletions) < 3:
                            await server.refuse(command, f"Node {NODE} is in use")
                        else:
                            nodes.clear()
                            await server.answer(command, {})
        except EOFError:
            return

    async def drop(monitor: Monitor) -> None:
        await asyncio.wait_for(drop_mirrors(Scripted(monitor, tmp_path), "r1"), 10)

    play(busy, drop)
    assert deletions == [NODE] * 3
