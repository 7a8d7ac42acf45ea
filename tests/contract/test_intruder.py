"""What the intruder of `tests/qemu/test_local_users.py` calls read: else that test cannot fail."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract


@pytest.fixture
def zombie() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    os.waitpid(pid, 0)


def done(own: Path, *paths: Path) -> list[list[str]]:
    program = [sys.executable, str(Path(__file__).parents[1] / "intruder.py"), str(own)]
    lines = "".join(f"{path}\n" for path in paths)
    told = subprocess.run(program, input=lines, capture_output=True, text=True, check=True).stdout
    return [json.loads(line)["done"] for line in told.splitlines()[1:]]


def test_the_maps_of_a_process_are_read_and_a_zombies_empty_ones_are_not(
    tmp_path: Path, zombie: int
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    own, dead, file, folder, nothing = done(
        tmp_path, Path("/proc/self/maps"), Path(f"/proc/{zombie}/maps"), empty, tmp_path,
        tmp_path / "nothing",
    )  # fmt: skip
    assert "read" in own
    assert "read" not in dead
    assert {"read", "write", "rename", "keep"} <= set(file)
    assert {"read", "create"} <= set(folder)
    assert nothing == []
