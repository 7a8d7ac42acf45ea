"""The command as a process: what its callers see when they look away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "vmckpt.cli.entry"]


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_error_that_nobody_reads_keeps_its_exit_code(tmp_path: Path, more: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, "vm", "show", "nobody", *more],
            env=os.environ | {"VMCKPT_STATE_DIR": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=writing,
            timeout=30,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 3


def test_output_that_nobody_reads_ends_the_command(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, "host", "list"],
            env=os.environ | {"VMCKPT_STATE_DIR": str(tmp_path)},
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 1
    assert done.stderr == b""
