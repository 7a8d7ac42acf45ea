"""Nothing of hosts that look like machines is left after `down`, whatever became of them."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.small_lab import PROGRAM, REPOSITORY, a_state_dir, left
from tests.real.machines import machines, packages
from vmckpt.errors import OperationFailedError, RefusedError, UsageError
from vmckpt.hosts.processes.process import is_alive
from vmckpt.lab import lab as labs
from vmckpt.lab.processes import tag
from vmckpt.lab.real.build import MachineKit
from vmckpt.lab.real.management import CABLE
from vmckpt.lab.state import lab_directory, read


@pytest.fixture
def state_dir() -> Iterator[Path]:
    with a_state_dir() as path:
        yield path


def cables(state_dir: Path) -> list[str]:
    """What is left of the lab's cables on this machine."""
    wanted = tag(lab_directory(state_dir))
    found = Path("/sys/class/net").glob(f"{CABLE}*/ifalias")
    return [str(path) for path in found if path.read_text().strip() == wanted]


def mounts(state_dir: Path) -> list[str]:
    """What any process has mounted from below the state directory."""
    found = []
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            found += [line for line in table.read_text().splitlines() if str(state_dir) in line]
        except OSError:
            continue
    return found


def nothing_is_left(state_dir: Path) -> bool:
    return not (left(state_dir) or cables(state_dir) or mounts(state_dir))


def test_down_is_quick_and_ends_what_runs_on_the_hosts(state_dir: Path) -> None:
    with machines([PROGRAM, PROGRAM]) as made:
        assert cables(made.state_dir)
        assert mounts(made.state_dir)
        assert made.ssh("lab-a", "setsid sleep 60 </dev/null >/dev/null 2>&1 & echo").code == 0
        made.inside("lab-b", "ip", "netns", "add", "inner")
        began_s = time.monotonic()
        removed = asyncio.run(labs.down(made.state_dir))
        assert time.monotonic() - began_s < 5.0
        assert removed.hosts == 2
        assert nothing_is_left(made.state_dir)


def test_two_labs_side_by_side_have_addresses_of_their_own(state_dir: Path) -> None:
    with machines([PROGRAM]) as one, machines([PROGRAM]) as two:
        assert one.lab.hosts[0].ssh_address != two.lab.hosts[0].ssh_address
        asyncio.run(labs.down(one.state_dir))
        assert two.ssh("lab-a", "hostname").stdout == "lab-a\n"


def test_a_host_whose_first_process_is_killed_is_gone_and_the_lab_says_so(state_dir: Path) -> None:
    with machines([PROGRAM]) as made:
        host = made.lab.host("lab-a")
        os.kill(host.holder.pid, 9)
        while is_alive(host.holder):
            time.sleep(0.01)
        with pytest.raises(RefusedError, match="incomplete"):
            read(made.state_dir)


RUN = """
import asyncio, sys
from pathlib import Path
from vmckpt.lab import lab
from vmckpt.lab.real.build import MachineKit
async def main():
    print("go", flush=True)
    state_dir, program, packages = map(Path, sys.argv[2:])
    if sys.argv[1] == "up":
        await lab.up(state_dir, hosts=2, qemus=[program], kit=MachineKit(packages))
    else:
        await lab.down(state_dir)
asyncio.run(main())
"""


@pytest.mark.parametrize(("verb", "span_s"), [("up", 0.6), ("down", 0.2)])
def test_killed_at_any_moment_then_down_leaves_nothing(
    state_dir: Path, verb: str, span_s: float
) -> None:
    outcomes = []
    for step in range(6):
        if verb == "down":
            kit = MachineKit(packages())
            asyncio.run(labs.up(state_dir, hosts=2, qemus=[PROGRAM], kit=kit))
        with subprocess.Popen(
            [sys.executable, "-c", RUN, verb, str(state_dir), str(PROGRAM), str(packages())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"go\n"
            time.sleep(span_s * step / 6)
            process.kill()
        outcomes.append(asyncio.run(labs.down(state_dir)))
        assert nothing_is_left(state_dir)
    assert any(outcome.processes for outcome in outcomes), "not once was it killed half-way"


def test_what_cannot_be_made_is_refused_and_leaves_nothing(state_dir: Path, tmp_path: Path) -> None:
    for where, why in ((tmp_path, "does not hold"), (broken(tmp_path / "broken"), "sshd")):
        with pytest.raises((RefusedError, OperationFailedError)) as refused:
            asyncio.run(labs.up(state_dir, hosts=1, qemus=[PROGRAM], kit=MachineKit(where)))
        assert why in refused.value.why
        assert nothing_is_left(state_dir)
    with pytest.raises(UsageError):
        asyncio.run(labs.up(state_dir, hosts=1, qemus=[], kit=MachineKit(packages())))


def broken(folder: Path) -> Path:
    """Packages whose sshd ends at once."""
    shutil.copytree(packages(), folder, symlinks=True)
    sshd = folder / "usr/sbin/sshd"
    sshd.write_text("#!/bin/false\n")
    return folder


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--real"], 4, "requires root"),
        (["--bare"], 2, "--real is missing"),
        (["--packages", "/"], 2, "--real is missing"),
        (["--real", "--bare", "--qemu", str(PROGRAM)], 2, "has no QEMU"),
    ],
)
def test_who_may_not_or_asks_wrongly_is_told(
    state_dir: Path, words: list[str], code: int, says: str
) -> None:
    somebody = ["unshare", "--user", "--map-user=1234", sys.executable, "-m", "vmckpt.cli.entry"]
    done = subprocess.run(
        [*somebody, "lab", "up", "--qemu", str(PROGRAM), *words],
        env=os.environ | {"VMCKPT_STATE_DIR": str(state_dir)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert says in done.stderr
