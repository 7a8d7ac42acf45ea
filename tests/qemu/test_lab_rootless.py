"""The lab without root: it works in a user namespace, or says why it cannot be."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.small_lab import PROGRAM, REPOSITORY, a_state_dir, left

NOBODY = "65534"


@pytest.fixture
def state_dir() -> Iterator[Path]:
    with a_state_dir() as path:
        yield path


ROOTLESS = """
import asyncio, json, sys
from pathlib import Path
from vmckpt.errors import VmckptError
from vmckpt.lab import lab, network, sockets, state
async def main(state_dir):
    made = await lab.up(state_dir, hosts=2, qemus=[Path(sys.argv[2])])
    a, b = made.hosts
    loop = asyncio.get_running_loop()
    with await sockets.open_socket(made, b.enter, "tcp") as listener:
        listener.bind((b.migration_address, 0))
        listener.listen()
        with await sockets.open_socket(made, a.enter, "tcp") as client:
            await loop.sock_connect(client, listener.getsockname())
            server, _ = await loop.sock_accept(listener)
            server.close()
    await network.shape_link(made, "lab-a", 10 << 20)
    await network.set_link(made, "lab-a", up=False)
    assert state.read(state_dir) == made
    removed = await lab.down(state_dir)
    return {"rootless": made.rootless, "processes": removed.processes}
try:
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
except VmckptError as exc:
    print(json.dumps({"what": exc.what, "why": exc.why, "remedy": exc.remedy}))
"""

# Puts a tun node of the given mode in place, for the program that it becomes.
WITH_TUN = """
import ctypes, os, stat, sys
path, mode = sys.argv[1], int(sys.argv[2], 8)
os.mknod(path, stat.S_IFCHR, os.makedev(10, 200))
os.chmod(path, mode)
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(path.encode(), b"/dev/net/tun", None, 4096, None):
    sys.exit(os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[3], sys.argv[3:])
"""


def a_python_of(everybody: bool) -> str:
    """A Python that no one may run too, if `everybody`."""
    pythons = [sys.executable, "/usr/bin/python3"]
    for python in pythons:
        reachable = all(
            parent.stat().st_mode & stat.S_IXOTH for parent in Path(python).resolve().parents
        )
        if Path(python).exists() and (reachable or not everybody):
            version = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
            if subprocess.run(version, check=False).returncode == 0:
                return python
    pytest.skip("no Python >= 3.11 that another user may run")


def as_nobody(state_dir: Path, tun_mode: str) -> dict[str, Any]:
    """What the ROOTLESS program says, run as nobody with a /dev/net/tun of that mode."""
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    os.chown(state_dir, int(NOBODY), int(NOBODY))
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    tun = state_dir / "tun"
    try:
        return run_rootless(
            [
                *("unshare", "--mount", "--propagation", "private"),
                *(sys.executable, "-c", WITH_TUN, str(tun), tun_mode, *drop),
            ],
            state_dir,
        )
    finally:
        tun.unlink(missing_ok=True)


def run_rootless(prefix: Sequence[str], state_dir: Path) -> dict[str, Any]:
    if not REPOSITORY.stat().st_mode & stat.S_IXOTH:
        pytest.skip("another user may not read this repository")
    program = [a_python_of(True), "-B", "-c", ROOTLESS, str(state_dir), str(PROGRAM)]
    done = subprocess.run(
        [*prefix, *program],
        check=False,
        capture_output=True,
        timeout=60,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
    )
    if done.returncode != 0 and b"unshare" in done.stderr:
        pytest.skip(f"this machine does not allow it: {done.stderr.decode()}")
    assert done.returncode == 0, done.stderr.decode()
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_nobody_gets_a_lab_too(state_dir: Path) -> None:
    answer = as_nobody(state_dir, "666")
    if "user namespace" in answer.get("why", ""):
        pytest.skip(answer["why"])
    assert answer == {"rootless": True, "processes": 4}
    assert left(state_dir) == []


def test_without_taps_nobody_is_told_what_to_do(state_dir: Path) -> None:
    answer = as_nobody(state_dir, "600")
    if "user namespace" in answer["why"]:
        pytest.skip(answer["why"])
    assert answer["what"] == "the lab's guests cannot have a network here"
    assert "/dev/net/tun" in answer["why"]
    assert "chmod 0666 /dev/net/tun" in answer["remedy"]
    assert left(state_dir) == []


def test_without_namespaces_the_reasons_are_told(state_dir: Path) -> None:
    limit = "open('/proc/sys/user/max_user_namespaces', 'w').write('0')"
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    program = f"import os, sys; {limit}; os.execvp(sys.argv[1], sys.argv[1:])"
    python = a_python_of(False)
    prefix = ["unshare", "--user", "--map-root-user", python, "-c", program, *powerless]
    if os.geteuid() == 0:
        python = a_python_of(True)
    answer = run_rootless(prefix, state_dir)
    assert answer["what"] == "the lab's networks cannot be made here"
    assert "Operation not permitted" in answer["why"]
    assert "No space left on device" in answer["why"]
    assert "user.max_user_namespaces" in answer["remedy"]
    assert left(state_dir) == []
