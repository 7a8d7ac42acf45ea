"""A userfaultfd made by another process: of a group by its device, and under a seccomp filter."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vmckpt import memory
from vmckpt.memory.borrowed import descriptor_from

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
    print(type(exc).__name__, exc.strerror)
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
        assert done.stdout.startswith("PermissionError its user may not use userfaultfd; ")
        assert "sysctl -w vm.unprivileged_userfaultfd=1" in done.stdout


UNUSED_CALL, USERFAULTFD = 500, 323
# Installs as many filters as it is told, then waits. They allow everything but one call.
CONFINED = """
import ctypes, struct, sys
libc = ctypes.CDLL(None)
denied = int(sys.argv[2])
words = [(0x20, 0, 0, 0), (0x15, 0, 1, denied), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *word) for word in words))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(code)))
libc.prctl(38, 1, 0, 0, 0)
for _ in range(int(sys.argv[1])):
    if libc.prctl(22, 2, program, 0, 0):
        sys.exit("no seccomp")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="not every user may have a userfaultfd made")
@pytest.mark.parametrize(
    ("filters", "words", "is_made"),
    [
        ("0", [], True),
        ("1", [], False),
        ("1", ["-sandbox", "on,spawn=deny"], True),
        ("1", ["-sandbox", "off"], False),
        # One more than QEMU's own: what it denies is not known.
        ("2", ["-sandbox", "on"], False),
    ],
)
def test_only_qemus_own_filter_is_known_to_allow_it(
    filters: str, words: list[str], *, is_made: bool
) -> None:
    command = [sys.executable, "-c", CONFINED, filters, str(UNUSED_CALL), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            assert child.stdout.readline() == b"ready\n"
            if is_made:
                os.close(descriptor_from(child.pid, 323, os.O_CLOEXEC | os.O_NONBLOCK))
            else:
                with pytest.raises(OSError, match="confined by seccomp"):
                    descriptor_from(child.pid, 323, os.O_CLOEXEC | os.O_NONBLOCK)
            assert child.poll() is None
        finally:
            child.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read filters")
def test_a_filter_that_forbids_the_call_is_read_and_named_and_the_process_lives() -> None:
    command = [sys.executable, "-c", CONFINED, "1", str(USERFAULTFD), "-sandbox", "on"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            assert child.stdout.readline() == b"ready\n"
            with pytest.raises(OSError, match="seccomp filter does not allow userfaultfd"):
                descriptor_from(child.pid, USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK)
            assert child.poll() is None
        finally:
            child.kill()
