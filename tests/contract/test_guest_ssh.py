"""Hooks by SSH: a real sshd and ssh(1); the guest is this machine, and the hook a small program."""

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sshd import Sshd, sshd
from vmckpt.devices import hook as hooks
from vmckpt.devices.contract import HookAnswer, HookPhase
from vmckpt.devices.hook import GuestHook, HookFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.ssh.address import Address
from vmckpt.vm.passthrough.passthrough import Passthrough, Strategy
from vmckpt.vm.paths import VmDir

HOOK = """\
#!/bin/sh
read -r request
echo "$1 $request" >> {log}
echo "${{SSH_AUTH_SOCK-none}}" > {log}.agent
case $1 in
    lock) sleep 60 ;;
    release) echo '{{"ok": false, "why": "somebody'"'"'s"}}'; exit 1 ;;
    restore) exit 255 ;;
    *) echo noise; echo '{{"ok": true, "device_bytes": 7}}' ;;
esac
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as made:
        yield made


class Told:
    """A hook, and what it was told."""

    def __init__(self, server: Sshd, directory: Path) -> None:
        self.path, self.log = directory / "my hook", directory / "log"
        self.path.write_text(HOOK.format(log=self.log))
        self.path.chmod(0o755)
        self._there, self._state = Address("127.0.0.1", None, server.port), directory

    def do(self, phase: HookPhase, *, port: int | None = None, limit_s: int = 20) -> HookAnswer:
        there = self._there if port is None else Address("127.0.0.1", None, port)
        limits = {phase.value: limit_s}
        device = Passthrough(
            "gpu0", "edu", None, Strategy.HOOK_DETACH, str(self.path), 0, limits, {}, ssh=there
        )
        host = LocalHost("a", self._state, "127.0.0.1")
        # No agent is at this VM's socket: there is no such VM.
        files = VmDir(self._state / "vms/web").qemu("q1")
        return asyncio.run(GuestHook(host, files, device, "run-1").do(phase))


@pytest.fixture
def told(server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """The host's ssh(1) has the server's settings, as a user's own has theirs."""
    real = shutil.which("ssh")
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin/ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {real} -F {server.config} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    return Told(server, tmp_path)


def test_a_phase_is_run_and_answers(told: Told) -> None:
    answer = told.do(HookPhase.CHECKPOINT)
    assert (answer.ok, answer.device_bytes) == (True, 7)
    phase, _, request = told.log.read_text().strip().partition(" ")
    assert phase == "checkpoint"
    assert json.loads(request) == {"format": 1, "device": "gpu0", "run": "run-1", "limit_s": 20}


def test_a_guest_is_not_lent_the_keys_of_who_asks_it(
    told: Told, server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = tmp_path / "agent", server.config.read_text()
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        server.config.write_text(f"{before}\nHost *\n    ForwardAgent yes\n")
        while not path.exists():
            time.sleep(0.01)
        told.do(HookPhase.CHECKPOINT)
    finally:
        server.config.write_text(before)
        agent.kill()
        agent.wait()
    assert told.log.with_suffix(".agent").read_text() == "none\n"


def test_what_the_hook_says_is_told(told: Told) -> None:
    with pytest.raises(HookFailedError) as error:
        told.do(HookPhase.RELEASE)
    assert error.value.why == "somebody's"
    assert len(told.log.read_text().splitlines()) == 1


def test_the_guest_ends_a_hook_that_takes_too_long(told: Told) -> None:
    with pytest.raises(HookFailedError) as error:
        told.do(HookPhase.LOCK, limit_s=1)
    assert "not done within 1 s" in error.value.why


@pytest.mark.parametrize("phase", [HookPhase.RESTORE, HookPhase.CHECKPOINT])
def test_no_answer_is_tried_again_and_then_said(
    told: Told, phase: HookPhase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 255 without a word is what ssh(1) says when it is not let in."""
    monkeypatch.setattr(hooks, "BACK_S", 0.3)
    monkeypatch.setattr(hooks, "BETWEEN_S", 0.3)
    with pytest.raises(HookFailedError) as error:
        told.do(phase, port=1 if phase is HookPhase.CHECKPOINT else None)
    assert "cannot be reached by SSH" in error.value.why
    if phase is HookPhase.CHECKPOINT:
        assert "refused" in error.value.why
        assert not told.log.exists()
    else:
        assert len(told.log.read_text().splitlines()) == 2
