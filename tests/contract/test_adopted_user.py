"""Whose QEMU may be adopted: what it names is opened with vmckpt's rights from then on."""

import asyncio
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.contract.test_remote_session import play
from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import identify
from vmckpt.vm.adopted.adopt import adopt, require_own_user

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_another_users_qemu_is_adopted_only_if_it_is_trusted(tmp_path: Path) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    asyncio.run(require_own_user(host, identify(os.getpid())))  # type: ignore[arg-type]
    argv = ["setpriv", f"--ruid={NOBODY}", "--", "cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as theirs:
        assert theirs.stdin
        assert theirs.stdout
        theirs.stdin.write(b"x")
        theirs.stdin.flush()
        theirs.stdout.read(1)  # it is `cat` by now
        process = identify(theirs.pid)
        assert process
        with pytest.raises(RefusedError) as refused:
            asyncio.run(require_own_user(host, process))
        theirs.stdin.close()
    assert f"uid {NOBODY}" in refused.value.what
    assert "--trust" in refused.value.remedy


NAMES_ITSELF = """\
import ctypes, time
ctypes.CDLL(None).prctl(15, b"\\rUid:\\t0\\t0\\t0\\t0")
print(flush=True)
time.sleep(600)
"""


def test_another_users_qemu_is_not_roots_by_its_name(tmp_path: Path) -> None:
    """Its name is a line of its own in /proc/PID/status, to who reads that so."""
    host = LocalHost("a", tmp_path, "127.0.0.1")
    argv = ["/usr/bin/python3", "-I", "-S", "-c", NAMES_ITSELF]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, user=NOBODY) as theirs:
        assert theirs.stdout
        assert theirs.stdout.readline() == b"\n"
        process = identify(theirs.pid)
        assert process
        try:
            with pytest.raises(RefusedError, match=f"uid {NOBODY}"):
                asyncio.run(require_own_user(host, process))
        finally:
            theirs.kill()


def listening(path: Path, user: int) -> socket.socket:
    """A socket of root's at which a user listens."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    os.seteuid(user)
    try:
        sock.listen()
    finally:
        os.seteuid(0)
    return sock


def test_another_users_words_are_no_qemus_whosever_process_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A monitor that says that its vCPUs are threads of a process of root's."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    host = LocalHost("a", tmp_path / "state", "127.0.0.1")
    monitor = tmp_path / "qmp"
    with listening(monitor, NOBODY), pytest.raises(RefusedError) as refused:
        asyncio.run(adopt("web", host, [monitor], None))
    assert f"uid {NOBODY}" in refused.value.what
    assert "--trust" in refused.value.remedy


def test_who_listens_at_a_socket_is_told_on_a_host_elsewhere_too(tmp_path: Path) -> None:
    async def work(host: Host) -> None:
        with listening(tmp_path / "ours", 0), listening(tmp_path / "theirs", NOBODY):
            for name in ("ours", "theirs"):
                (await host.connect(tmp_path / name)).close()
            (await host.connect(tmp_path / "ours", of_anyone=False)).close()
            with pytest.raises(RefusedError, match=r"another user \(uid \d+\) listens"):
                await host.connect(tmp_path / "theirs", of_anyone=False)

    asyncio.run(work(LocalHost("a", tmp_path, "127.0.0.1")))
    play(lambda host, _: work(host), tmp_path)
