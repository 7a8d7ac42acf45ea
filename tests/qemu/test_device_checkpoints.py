"""Checkpoints, restores and forks of a guest with a device that is taken out for them."""

import signal
import time
from collections.abc import Iterator

import pytest

from tests.qemu.device_guest import NAME, job, place, run_worker, settled, well
from tests.qemu.world import World, qemu, send, world
from vmckpt.hosts.processes.process import find_by_argument


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world(qemu("10.0"), qemu("10.0")) as one:
        run_worker(one, "lab-a")
        yield one


def test_a_checkpoint_is_of_an_instant_without_the_device(made: World) -> None:
    """The job waits for it and goes on; put back, it goes on from what it had counted then."""
    before = job(made)
    made.ok("checkpoint", "create", NAME, "--name", "counted")
    after = well(made, before)
    made.ok("checkpoint", "restore", "counted", "--in-place")
    again = well(made, before)
    assert before.count <= again.count
    assert again.pid == after.pid
    for refused in (
        made.vmckpt("replicate", "start", NAME, "lab-b"),
        made.vmckpt("checkpoint", "create", NAME, "--kind", "file"),
    ):
        assert refused.error["exit_code"] == 4
        assert "passed through (hook-detach)" in refused.error["why"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_fork_has_a_device_of_its_own(made: World) -> None:
    before = job(made)
    made.ok("checkpoint", "create", NAME, "--name", "forked")
    forks = made.ok("fork", "forked", "--count", "2", "--name", "f")["forks"]
    try:
        assert [(one["name"], one["error"]) for one in forks] == [("f-1", ""), ("f-2", "")]
        for name in ("f-1", "f-2", NAME):
            assert well(made, before, name).count >= before.count
    finally:
        for name in ("f-1", "f-2"):
            made.vmckpt("vm", "stop", name, "--force")
            made.vmckpt("vm", "rm", name)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("word", ["hook-checkpoint", "unplug", "work"])
def test_a_checkpoint_whose_service_is_killed(made: World, word: str) -> None:
    before = job(made)
    host, path = place(made)
    mark = path.parent / "devices-away"
    command = made.begin("checkpoint", "create", NAME)
    try:
        deadline = time.monotonic() + 60
        while command.poll() is None and (not mark.exists() or mark.read_text() != word):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        send(signal.SIGKILL, find_by_argument(f"{made.state(host)}/jobs/checkpoint"))
    finally:
        made.kill(command)
    settled(made)
    well(made, before)
    assert not mark.exists()
