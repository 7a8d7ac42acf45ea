"""A userfaultfd for members of a group, by its device, where the kernel gives the call to root."""

import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from vmckpt import memory

pytestmark = pytest.mark.contract

DEVICE = Path("/dev/userfaultfd")
NOBODY, GROUP = "65534", "64999"
# Another process of that user's makes it, and does not keep it.
PROGRAM = """
import os, subprocess
from vmckpt.memory.borrowed import descriptor_from
child = subprocess.Popen(["sleep", "60"])
try:
    made = descriptor_from(child.pid, 323, os.O_CLOEXEC | os.O_NONBLOCK)
    print(os.readlink(f"/proc/self/fd/{made}"))
    print(sorted(os.listdir(f"/proc/{child.pid}/fd")))
except OSError as exc:
    print(type(exc).__name__)
finally:
    child.kill()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("groups", [GROUP, NOBODY])
def test_who_may_open_the_device_may_have_one_made(groups: str) -> None:
    # Where other users may be.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        _try(Path(directory), groups)


def _try(tmp_path: Path, groups: str) -> None:
    sysctl = Path("/proc/sys/vm/unprivileged_userfaultfd")
    if not DEVICE.exists() or sysctl.read_text().strip() != "0":
        pytest.skip("the kernel has no such device, or lets every user make the call")
    tmp_path.chmod(0o755)
    package = tmp_path / "vmckpt/memory"
    package.mkdir(parents=True)
    package.parent.joinpath("__init__.py").touch()
    package.joinpath("__init__.py").touch()
    for name in ("borrowed.py", "process_call.py"):
        shutil.copy(Path(memory.__file__).with_name(name), package)
    node = tmp_path / "device"
    os.mknod(node, stat.S_IFCHR | 0o600, DEVICE.stat().st_rdev)
    os.chown(node, 0, int(GROUP))
    node.chmod(0o660)
    become = f"setpriv --reuid={NOBODY} --regid={NOBODY} --groups={groups}"
    python = f"env PYTHONPATH={tmp_path} /usr/bin/python3 -B -c '{PROGRAM}'"
    script = f"mount --bind {node} {DEVICE} && exec {become} {python}"
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if groups == GROUP:
        assert done.stdout.split("\n")[:2] == ["anon_inode:[userfaultfd]", "['0', '1', '2']"]
    else:
        assert done.stdout == "PermissionError\n"
