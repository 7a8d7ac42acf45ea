"""Adopted QEMUs whose memory is in back ends of its own: NUMA nodes, a memory module, a memfd."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.test_adopt import HAND, NUMA, PLAIN, adopt, by_hand
from tests.qemu.test_adopted_copies import AGENT, copied_and_forked, has_run_on, words
from tests.qemu.test_checkpoint import all_there, in_memory, sound
from tests.qemu.world import COMMAND, World, image, qemu, world
from vmckpt.hosts.processes.process import is_alive
from vmckpt.lab.guests.labguest import LabGuest

MIB, ROLLED_BACK = 1 << 20, 7
MODULE = " -object memory-backend-ram,id=d0,size=128M -device pc-dimm,memdev=d0,id=dimm0,node=1"
BLOCKS = NUMA.replace("-m 256 ", "-m 256,slots=2,maxmem=1G ") + MODULE
# As for virtiofs and the like; the file of the second is one that someone has chosen.
ONE = PLAIN.replace("-m 256", "-m 256 -M q35,memory-backend=m -object memory-backend-{}")
MEMFD = ONE.format("memfd,id=m,size=256M")
CHOSEN = Path("/dev/shm/vk-hand-memory")
FILE = ONE.format(f"file,id=m,size=256M,mem-path={CHOSEN},share=on")
LONG = pytest.mark.long


async def under_load(made: World, megabytes: int) -> None:
    control = await HAND.control(made.lab)
    await control.load_memory(f"rate=20M set={megabytes}M pattern=uniform content=random")
    await control.load_disk("rate=2M size=16M")
    await control.close()


@pytest.mark.timeout(300)
def test_memory_in_several_blocks_is_copied() -> None:
    with world(qemu("10.0")) as made, by_hand(made, f"{BLOCKS} {AGENT}", monitors=3) as process:
        adopt(made)
        asyncio.run(under_load(made, 100))
        made.ok("checkpoint", "create", "hand", "--name", "point")
        copied = made.ok("checkpoint", "restore", "point", "--as", "copy")
        assert copied["warnings"] == []
        has_run_on(made, "copy")
        assert is_alive(process)


@pytest.fixture
def chosen() -> Iterator[None]:
    """Nothing stays of the file that someone has chosen."""
    yield
    CHOSEN.unlink(missing_ok=True)


@LONG
@pytest.mark.usefixtures("chosen")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("style", "megabytes", "cannot"),
    [
        pytest.param(BLOCKS, 200, ["replicate"], id="nodes and a module"),
        pytest.param(MEMFD, 64, [], id="memfd"),
        pytest.param(FILE, 64, [], id="file"),
    ],
)
def test_it_has_checkpoints_copies_and_forks(style: str, megabytes: int, cannot: list[str]) -> None:
    with world(qemu("10.0")) as made, by_hand(made, f"{style} {AGENT}", monitors=3) as process:
        adopt(made)
        assert made.ok("vm", "show", "hand")["cannot"] == cannot
        asyncio.run(under_load(made, megabytes))
        taken = made.ok("checkpoint", "create", "hand", "--name", "point")
        assert taken["memory_bytes"] == (384 if cannot else 256) * MIB
        copied_and_forked(made)
        assert is_alive(process)
        asyncio.run(sound(made, HAND))
        # All blocks are in one file; forks share it.
        memory = {path for name in ("f-1", "f-2") for path in in_memory(made, name)}
        assert [path.stat().st_nlink for path in memory] == [2, 2]
        assert {path.stat().st_size for path in memory} == {taken["memory_bytes"]}
        for name in ("copy", "f-1"):
            assert any('"mem-path":"/dev/shm/vmckpt-' in word for word in words(made, name))
            made.ok("checkpoint", "create", name, "--name", f"of-{name}")
            made.ok("checkpoint", "restore", f"of-{name}", "--in-place")
            has_run_on(made, name)
            rate = made.ok("dirty-rate", name, "--for", "1s")
            assert rate["source"] == "page-tracking"
            asyncio.run(all_there(made, name))
            made.ok("vm", "stop", name, "--force")
            made.ok("vm", "start", name)
        for name in ("copy", "f-1", "f-2"):
            made.ok("vm", "stop", name, "--force")
            made.ok("vm", "rm", name, "--disks")
        made.ok("checkpoint", "restore", "point", "--in-place", "--eager")
        asyncio.run(sound(made, HAND))
        if cannot:
            lease = ("--lease", str(made.shared / "leases"))
            refused = made.vmckpt("replicate", "start", "hand", "lab-b", *lease)
            assert refused.code != 0


@LONG
@pytest.mark.timeout(600)
def test_whatever_else_is_done_with_it() -> None:
    """The first QEMU has its memory alone, later ones in vmckpt's file."""
    with world(qemu("10.0"), qemu("10.0")) as made, by_hand(made, f"{BLOCKS} {AGENT}", 3):
        adopt(made)
        asyncio.run(under_load(made, 200))
        assert made.ok("dirty-rate", "hand", "--for", "1s")["ram_bytes"] == 384 * MIB
        made.ok("schedule", "add", "hand", "--every", "1h", "--keep-last", "2")
        made.ok("schedule", "run-due")
        made.ok("schedule", "rm", "hand")
        for command, code in (("true", 0), ("false", ROLLED_BACK)):
            line = ("guard", "hand", "--for", "1s", "--every", "1s", "--json", "--", command)
            done = subprocess.run([*COMMAND, *line], env=made.environment, check=False)
            assert done.returncode == code, done
            asyncio.run(sound(made, HAND))
        mate = LabGuest("mate", 2, image(), memory="96M", disk=None)
        made.run_guest(mate, "lab-b")
        cut = ("--group", "hand,mate", "--name", "cut", "--max-hold", "3s")
        made.ok("checkpoint", "create", *cut)
        made.ok("checkpoint", "restore", "--group", "cut", "--in-place")
        asyncio.run(sound(made, HAND))
        store = ("--store", str(made.shared / "store"))
        made.ok("store", "init", store[1])
        made.ok("checkpoint", "create", "hand", "--name", "point", *store)
        made.ok("vm", "stop", "hand", "--force")
        made.ok("vm", "rm", "hand")
        (made.state_dir / "root.qcow2").unlink()
        there = (*store, "--host", "lab-b")
        assert made.ok("checkpoint", "restore", "point", *there)["host"] == "lab-b"
        asyncio.run(sound(made, HAND))
        asyncio.run(all_there(made, "hand"))
        for host in ("lab-a", "lab-b"):
            moved = made.ok("migrate", "hand", host)
            assert moved["method"] == "stop"  # under TCG QEMU sees writes to the first block alone
        asyncio.run(sound(made, HAND))
        planned = made.ok("plan", "hand", "lab-a", "--for", "1s")
        assert planned["way"], planned
        made.ok("vm", "stop", "hand", "--force")
