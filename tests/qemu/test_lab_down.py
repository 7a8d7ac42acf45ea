"""Nothing of a lab is left after `down`, whatever became of it."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.small_lab import PROGRAM, REPOSITORY, a_lab, a_state_dir, left
from vmckpt.errors import RefusedError
from vmckpt.lab import lab as labs
from vmckpt.lab.processes import tool
from vmckpt.lab.state import read


@pytest.fixture
def state_dir() -> Iterator[Path]:
    with a_state_dir() as path:
        yield path


def in_namespace(inodes: set[int]) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if (entry / "ns/net").stat().st_ino in inodes:
                    found.append(entry.name)
            except OSError:
                continue
    return found


def test_down_without_a_lab_does_nothing(state_dir: Path) -> None:
    removed = asyncio.run(labs.down(state_dir))
    assert (removed.hosts, removed.processes, removed.ram_files) == (0, 0, 0)


def test_down_ends_everything_in_the_lab_and_removes_ram_files(state_dir: Path) -> None:
    async def main() -> None:
        async with a_lab(state_dir) as lab:
            # Held open: what has gone gives its number to the next that another test makes.
            held = [
                os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)
                for process in (lab.client, *(host.holder for host in lab.hosts))
            ]
            inodes = {os.fstat(one).st_ino for one in held}
            # Neither is marked by its environment; one is deaf to SIGTERM, as a wedged QEMU is.
            said = "print(flush=True); pause()"
            deaf = f"from signal import *; signal(SIGTERM, SIG_IGN); {said}"
            strangers = [
                await asyncio.create_subprocess_exec(
                    *(*host.enter, sys.executable, "-c", code), env={}, stdout=subprocess.PIPE
                )
                for host, code in zip(
                    lab.hosts, (f"from signal import *; {said}", deaf), strict=True
                )
            ]
            for stranger in strangers:
                assert stranger.stdout is not None
                await stranger.stdout.readline()
            other = Path(f"/dev/shm/vmckpt-vm1-other{os.getpid()}.ram")
            ram = Path(f"/dev/shm/vmckpt-vm1-test{os.getpid()}/ram")
            ram.parent.mkdir(mode=0o700)
            for path in (other, ram):
                path.touch(0o600)  # test_local_users looks for what others may read
            (lab.hosts[1].state_dir / f"vms/vm1/qemu-test{os.getpid()}").mkdir(parents=True)
            removed = await labs.down(state_dir)
            assert removed.ram_files == 1
            assert not ram.parent.exists()
            assert other.exists(), "not the lab's"
            other.unlink()
            assert in_namespace(inodes) == []
            for one in held:
                os.close(one)
            assert [await process.wait() for process in strangers] == [
                -signal.SIGTERM,
                -signal.SIGKILL,
            ]

    asyncio.run(main())
    assert left(state_dir) == []


def test_a_qemu_of_the_lab_gets_a_tap_and_goes_with_it(state_dir: Path) -> None:
    named = [os.environ.get(f"VMCKPT_TEST_QEMU_{version}") for version in ("10_0", "7_2")]
    qemu = next(filter(None, [*named, shutil.which("qemu-system-x86_64")]), None)
    if qemu is None:
        pytest.skip("no QEMU here")

    async def main() -> None:
        lab = await labs.up(state_dir, hosts=1, qemus=[Path(qemu)])
        run_dir = lab.hosts[0].state_dir / "vms/vm1/qemu-0badcafe"
        run_dir.mkdir(parents=True)
        ram = Path("/dev/shm/vmckpt-vm1-0badcafe.ram")
        process = await asyncio.create_subprocess_exec(
            *(*lab.hosts[0].enter, qemu, "-machine", "none", "-display", "none", "-S"),
            *("-object", f"memory-backend-file,id=m0,size=16M,share=on,mem-path={ram}"),
            *("-netdev", "tap,id=n0,ifname=vm1,script=no,downscript=no"),
            *("-pidfile", str(run_dir / "pid"), "-monitor", "none", "-serial", "none"),
            umask=0o077,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        plug = [*lab.hosts[0].enter, tool("ip"), "link", "set", "vm1", "master", "br0", "up"]
        try:
            async with asyncio.timeout(10):
                # QEMU writes the pid file, then makes the tap, then the memory's file.
                while (
                    await (await asyncio.create_subprocess_exec(*plug)).wait() or not ram.exists()
                ):
                    assert process.returncode is None
                    await asyncio.sleep(0.02)
            assert int((run_dir / "pid").read_text()) == process.pid
            await labs.down(state_dir)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
        assert not ram.exists()

    asyncio.run(main())
    assert left(state_dir) == []


def test_a_cancelled_up_leaves_nothing(state_dir: Path) -> None:
    async def main(after_s: float) -> None:
        making = asyncio.ensure_future(labs.up(state_dir, hosts=2, qemus=[PROGRAM]))
        await asyncio.sleep(after_s)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        if not making.cancelled():
            await labs.down(state_dir)

    for step in range(5):
        asyncio.run(main(step * 0.02))
        assert left(state_dir) == []


def test_a_lab_that_lost_a_process_or_its_record_says_so(state_dir: Path) -> None:
    async def main() -> None:
        for damage in ("holder", "record", "no record"):
            lab = await labs.up(state_dir, hosts=2, qemus=[PROGRAM])
            if damage == "holder":
                os.kill(lab.hosts[0].holder.pid, signal.SIGKILL)
                await asyncio.sleep(0.05)
            elif damage == "record":
                (state_dir / "lab" / "lab.json").write_text('{"hosts": 7}')
            else:
                (state_dir / "lab" / "lab.json").unlink()
            with pytest.raises(RefusedError, match="incomplete"):
                read(state_dir)
            with pytest.raises(RefusedError, match="incomplete"):
                await labs.up(state_dir, hosts=2, qemus=[PROGRAM])
            assert (await labs.down(state_dir)).hosts == 2
            assert left(state_dir) == []

    asyncio.run(main())


def test_a_lab_whose_directory_was_deleted_can_still_be_taken_down(state_dir: Path) -> None:
    async def main() -> None:
        await labs.up(state_dir, hosts=2, qemus=[PROGRAM])
        shutil.rmtree(state_dir)
        with pytest.raises(RefusedError, match="incomplete"):
            await labs.up(state_dir, hosts=2, qemus=[PROGRAM])
        assert (await labs.down(state_dir)).processes == 4

    asyncio.run(main())
    assert left(state_dir) == []


RUN = """
import asyncio, sys
from pathlib import Path
from vmckpt.lab import lab
async def main():
    print("go", flush=True)
    if sys.argv[2] == "up":
        await lab.up(Path(sys.argv[1]), hosts=2, qemus=[Path(sys.argv[3])])
    else:
        await lab.down(Path(sys.argv[1]))
asyncio.run(main())
"""


@pytest.mark.parametrize(("verb", "span_s"), [("up", 0.25), ("down", 0.05)])
def test_killed_at_any_moment_then_down_leaves_nothing(
    state_dir: Path, verb: str, span_s: float
) -> None:
    outcomes = []
    for step in range(10):
        if verb == "down":
            asyncio.run(labs.up(state_dir, hosts=2, qemus=[PROGRAM]))
        with subprocess.Popen(
            [sys.executable, "-c", RUN, str(state_dir), verb, str(PROGRAM)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"go\n"
            time.sleep(span_s * step / 10)
            process.kill()
        outcomes.append(asyncio.run(labs.down(state_dir)))
        assert left(state_dir) == []
    assert any(outcome.processes for outcome in outcomes), "not once was it killed half-way"
