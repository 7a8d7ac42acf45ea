"""Post-copy survives the network: a cut link pauses the guest until it is repaired."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.qemu.world import COMMAND, World, image, loaded, qemu, world
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.network import set_link

WORDS = ["--method", "postcopy", "--bandwidth", "15MB"]


@pytest.fixture(params=["10.0 10.0", pytest.param("10.0 7.2", marks=pytest.mark.long)])
def made(request: pytest.FixtureRequest) -> Iterator[World]:
    first, second = request.param.split()
    with world(qemu(first), qemu(second)) as one:
        one.run_guest(guest(), "lab-a")
        yield one


def guest() -> LabGuest:
    return LabGuest("mover", 1, image(), machine="pc-q35-7.2")


async def into_postcopy(made: World, command: "asyncio.subprocess.Process") -> None:
    log = made.lab.host("lab-b").state_dir / "vms/mover"
    for _ in range(600):
        if any("running 1" in path.read_text() for path in log.glob("qemu-*/stderr.log")):
            return
        assert command.returncode is None
        await asyncio.sleep(0.05)
    raise AssertionError("post-copy never began")


async def begin(made: World) -> "asyncio.subprocess.Process":
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *COMMAND, "migrate", "mover", "lab-b", *WORDS, "--json",
        env=made.environment, stdout=pipe, stderr=pipe,
    )  # fmt: skip


def test_a_link_that_is_cut_and_mended(made: World) -> None:
    async def cut_and_mend() -> None:
        async with loaded(made, guest()) as control:
            # Enough to be still sending when the link goes.
            await control.load_memory("rate=100M set=96M")
            command = await begin(made)
            await into_postcopy(made, command)
            await set_link(made.lab, "lab-b", up=False)
            assert command.stderr is not None
            said = await asyncio.wait_for(command.stderr.readuntil(b"rejoin"), 90)
            await set_link(made.lab, "lab-b", up=True)
            out, err = await asyncio.wait_for(command.communicate(), 120)
            assert command.returncode == 0, (said + err).decode()
            assert b'"postcopy"' in out
            await control.ping()
            assert made.files("lab-a") == []

    asyncio.run(cut_and_mend())
    assert made.ok("vm", "show", "mover")["host"] == "lab-b"
