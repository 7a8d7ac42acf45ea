"""`vmckpt guard` where there is no guest: what is refused, and what the list shows."""

import asyncio
import http.server
import json
import os
import shlex
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from tests.commands import vmckpt
from tests.fake_libvirtd import FakeLibvirtd
from tests.unit.test_guard_records import request as asked
from vmckpt.drivers.direct import DirectVm
from vmckpt.drivers.domain import LibvirtDomain
from vmckpt.errors import RefusedError
from vmckpt.fleet.guard import guard as guards
from vmckpt.fleet.guard import health
from vmckpt.fleet.guard.health import parse_check
from vmckpt.fleet.guard.proof import require_provable
from vmckpt.fleet.guard.record import GuardPhase, GuardProof, GuardRecord, Where
from vmckpt.fleet.guard.rollback import run_hook
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.vm.domains import sessions
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import as_domain
from vmckpt.vm.domains.replies import DomainInfo
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

pytestmark = pytest.mark.contract


def guard(state: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = vmckpt(state, "guard", *words)
    return done.returncode, json.loads(done.stdout)


def test_what_cannot_be_guarded_is_said_and_not_begun(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    command = ["--json", "--", "touch", str(mark)]
    assert guard(tmp_path, "web", *command)[0] == 3
    wrong = [["--for", "soon"], ["--check", "tcp:x"], ["--in", "there"], ["--proof", "none"]]
    for words in (*wrong, ["--after-rollback", "mail 'root"], ["--on-failure", "panic"]):
        assert guard(tmp_path, "web", *words, *command)[0] == 2
    for verb in ("commit", "rollback", "resume"):
        code, said = guard(tmp_path, verb, "web", "--json")
        assert (code, said["error"]["what"]) == (3, "'web' has no guard")
    assert guard(tmp_path, "list", "--json") == (0, {"guards": []})
    assert not mark.exists()


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/well" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _Chatter(socketserver.StreamRequestHandler):
    """Something that is there and no web server."""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"* OK ready when you are\r\n")


@contextmanager
def talking(
    kind: type[socketserver.BaseRequestHandler],
) -> Iterator[socketserver.ThreadingTCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def pages() -> Iterator[int]:
    with talking(_Page) as server:
        yield server.server_address[1]


def health_problems(state: str, *texts: str) -> list[str]:
    async def inspect() -> Any:
        return SimpleNamespace(state=state, ended=None)

    vm: Any = SimpleNamespace(name="web", host=SimpleNamespace(name="a"), inspect=inspect)
    checks = tuple(parse_check(text, None) for text in texts)
    return asyncio.run(health.health_problems(vm, checks))


def test_each_check_says_what_is_wrong() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        closed = nobody.getsockname()[1]
        with pages() as port, talking(_Chatter) as chatter:
            url = f"http://127.0.0.1:{port}"
            well = (f"{url}/well", f"tcp:127.0.0.1:{port}", "true")
            assert health_problems("running", *well, "sh -c 'test $VMCKPT_VM = web'") == []
            found = health_problems(
                "running",
                f"{url}/ill",
                f"http://127.0.0.1:{chatter.server_address[1]}",
                f"tcp:127.0.0.1:{closed}",
                "sh -c 'echo no >&2; exit 4'",
                "no-such-program",
            )
    assert "HTTP 503" in found[0]
    assert "does not answer as a web server does" in found[1]
    assert "refused" in found[2].lower()
    assert found[3].endswith("exit status 4: no")
    assert "No such file" in found[4]


def test_a_check_that_prints_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 60.0)
    flood = "import os\nwhile True: os.write(2, b'a' * 65536)"
    [found] = health_problems("running", shlex.join([sys.executable, "-c", flood]))
    assert found.endswith("it printed more than 64.0 MiB, and was ended")


def test_a_check_whose_output_another_session_holds_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As the process that ssh leaves behind with ControlPersist may.
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 1.0)
    pid_file = tmp_path / "pid"
    check = f"setsid sh -c 'echo $$ > {pid_file}; exec sleep 60' & sleep 60"
    began_s = time.monotonic()
    try:
        [found] = health_problems("running", shlex.join(["sh", "-c", check]))
        assert found.endswith("no answer within 1 s")
        assert time.monotonic() - began_s < 20
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    """A guest that has others asked for it, or itself."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        host = {"/away": "localhost", "/on": "127.0.0.1"}.get(self.path)
        self.send_response(302 if host else 200)
        if host:
            self.send_header("Location", f"http://{host}:{self.connection.getsockname()[1]}/end")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_guest_has_nobody_asked_but_itself() -> None:
    with talking(_Elsewhere) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert health_problems("running", f"{url}/on") == []
        [found] = health_problems("running", f"{url}/away")
    assert "HTTP 302" in found
    assert _Elsewhere.asked == ["/on", "/end", "/away"]


class _Endless(socketserver.StreamRequestHandler):
    """A guest whose redirect, or header, has no end."""

    sent: ClassVar[int] = 0

    def handle(self) -> None:
        begins = b"HTTP/1.1 302 Found\r\nLocation: /\r\n"
        if b"body" in self.rfile.readline():
            begins += b"\r\n"
        with suppress(OSError):
            self.wfile.write(begins)
            while type(self).sent < 64 << 20:
                type(self).sent += self.connection.send(b"a: b\r\n" * 10_000)


@pytest.mark.parametrize("path", ["body", "head"])
def test_a_guest_whose_answer_has_no_end_is_not_read_to_it(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(_Endless, "sent", 0)
    with talking(_Endless) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/{path}"
        [found] = health_problems("running", url)
    assert "too long" in found
    assert _Endless.sent < 32 << 20


class _Dripping(socketserver.StreamRequestHandler):
    """A guest that says a little of its answer now and then; `gone`: it was hung up on."""

    gone: ClassVar[threading.Event] = threading.Event()

    def handle(self) -> None:
        with suppress(OSError):
            for _ in range(200):
                self.wfile.write(b"H")
                time.sleep(0.05)
            return
        self.gone.set()


def test_a_check_that_is_given_up_leaves_nothing_that_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 0.5)
    with talking(_Dripping) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        [found] = health_problems("running", url)
        assert found.endswith("no answer within 0.5 s")
        assert _Dripping.gone.wait(5)


class _Hostile(socketserver.StreamRequestHandler):
    """A guest whose words fit into no environment."""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 500 a\0\x1b[2J" + b"\xff" * 65_000 + b"\r\n\r\n")


def test_a_command_after_a_rollback_runs_whatever_the_guest_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(_Hostile) as guest:
        url = f"http://127.0.0.1:{guest.server_address[1]}"
        found = health_problems("running", url, url, url)
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    command = f"sh -c 'echo $VMCKPT_WHY >{tmp_path}/why'"
    request = replace(asked(), after_rollback=(command,))
    for why in ("; ".join(found), "the agent says a\0b"):
        record = GuardRecord("r1", request, GuardPhase.ROLLED_BACK, 1.0, why=why)
        told: list[str] = []
        asyncio.run(run_hook(command, record, LocalHost("a", tmp_path, "127.0.0.1"), told.append))
        assert told == []
        said = (tmp_path / "why").read_text()
        assert said.startswith(why[:12])
        assert said[:-1].isprintable()


def test_a_vm_whose_disk_could_not_be_restored_is_not_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rollback made a file in the host's memory of its volume."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    text = f'name = "web"\nmemory = "64M"\n[[disks]]\npath = "{tmp_path}/volume"\n'
    directory = vm_dir(tmp_path, "web")
    spec = parse_spec(text, "x", directory.path)
    qemu = Qemu(directory.qemu("1"), ProcessId(0, 0), Platform("q35", "tcg", "qemu64"))
    vm = Vm(spec, LocalHost("a", tmp_path, "127.0.0.1"), directory, qemu)

    async def find(*_: object) -> DirectVm:
        return DirectVm(vm)

    async def well(*_: object) -> list[str]:
        return []

    async def is_block_device(_: object, path: Path) -> bool:
        return path.name == "volume"

    monkeypatch.setattr(guards, "health_problems", well)
    monkeypatch.setattr(LocalHost, "is_block_device", is_block_device)
    tools = guards.GuardTools(print, print, cast("Any", None), 1, find)
    request = replace(asked(), vm="web", checks=(), where=Where.HERE)
    with pytest.raises(RefusedError, match="'web' could not be rolled back"):
        asyncio.run(guards.guard("r1", request, tools))
    assert guard(tmp_path, "list", "--json") == (0, {"guards": []})


@pytest.mark.parametrize(
    ("checks", "in_guest", "named"),
    [(["agent"], False, "agent"), (["tcp:80"], False, "tcp:80"), ([], True, "--in guest")],
)
def test_what_needs_an_agent_is_refused_where_there_is_none(
    checks: list[str], in_guest: bool, named: str
) -> None:
    """Before the checkpoint: the command in the guest would fail, and the VM be rolled back."""

    async def inspect() -> Any:
        return SimpleNamespace(guest_agent=False)

    vm: Any = SimpleNamespace(name="web", inspect=inspect)
    found = tuple(parse_check(text, None) for text in checks)
    with pytest.raises(RefusedError, match=f"cannot do {named}"):
        asyncio.run(health.require_possible(vm, found, in_guest=in_guest))
    elsewhere = (parse_check("tcp:192.0.2.1:80", None), parse_check("true", None))
    asyncio.run(health.require_possible(vm, elsewhere, in_guest=False))


def test_no_copy_is_to_prove_the_checkpoint_of_a_domain_that_none_can_be_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused after the checkpoint had been taken."""
    later = [""]

    def described(devices: str) -> str:
        return (
            "<domain type='kvm'><name>web</name><os><type machine='q35'>hvm</type></os>"
            f"<devices>{devices}</devices></domain>"
        )

    @asynccontextmanager
    async def libvirtd(host: Any) -> AsyncIterator[FakeLibvirtd]:
        yield FakeLibvirtd(host, definition=described(later[0]))

    monkeypatch.setattr(sessions, "libvirtd", libvirtd)

    def domain(devices: str) -> LibvirtDomain:
        xml = described(devices)
        seen = DomainInfo("1" * 32, "web", DomainState.RUNNING, 1, True, xml)
        return LibvirtDomain(as_domain(LocalHost("a", tmp_path, "::1"), seen))

    shared = domain("<serial type='file'><source path='/var/log/web.log'/></serial>")
    with pytest.raises(RefusedError, match="no copy of 'web'") as refused:
        asyncio.run(require_provable(shared, GuardProof.RUN))
    assert "--proof read" in refused.value.remedy
    asyncio.run(require_provable(shared, GuardProof.READ))
    asyncio.run(require_provable(domain("<serial type='pty'/>"), GuardProof.RUN))
    # Nor where it is to have that with its next start.
    for one in (
        "<filesystem type='mount'><source dir='/srv'/><target dir='srv'/></filesystem>",
        "<disk type='file'><source file='/srv/more.raw'/><target dev='vdz'/></disk>",
    ):
        later[0] = one
        with pytest.raises(RefusedError, match="no copy of 'web'"):
            asyncio.run(require_provable(domain("<serial type='pty'/>"), GuardProof.RUN))


def test_a_vm_that_does_not_run_is_not_well() -> None:
    assert health_problems("internal-error", "true") == ["it is internal-error"]


def test_a_check_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 0.2)
    assert health_problems("running", "sleep 3600") == ["sleep 3600: no answer within 0.2 s"]
