"""SSH as it fails: each way has an error of its own that says what repairs it."""

import asyncio
import errno
import getpass
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.nobody import as_nobody
from tests.sshd import Sshd, sshd
from tests.waiting import eventually
from vmckpt.errors import HostDownError, StorageError, UsageError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.inventory.inventory import reach
from vmckpt.hosts.ssh import wire
from vmckpt.hosts.ssh.address import Address
from vmckpt.hosts.ssh.entry import SshEntry
from vmckpt.hosts.ssh.login import Login, log_in
from vmckpt.hosts.ssh.settings import read_settings


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as made:
        yield made


def config(server: Sshd, path: Path, *lines: str) -> Path:
    """The server's configuration for clients, with `lines` before it."""
    path.write_text("\n".join([*lines, server.config.read_text()]))
    return path


def ask(entry: SshEntry) -> None:
    async def play() -> None:
        host = reach(entry)
        try:
            await host.make_dir(entry.state_dir)
            await host.write_text(entry.state_dir / "file", "x")
        finally:
            await host.close()

    asyncio.run(play())


def refusal(entry: SshEntry) -> HostDownError:
    with pytest.raises(HostDownError) as caught:
        ask(entry)
    return caught.value


def at(entry: SshEntry, **changed: object) -> SshEntry:
    return replace(entry, address=entry.address._replace(**changed))  # type: ignore[arg-type]


def test_an_unknown_key_is_refused_and_the_remedy_lets_it_in(server: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known"
    mine = config(server, tmp_path / "config", f"UserKnownHostsFile {known}")
    entry = at(server.entry("a", tmp_path), config=mine)
    error = refusal(entry)
    key = server.directory / "host_key.pub"
    shown = subprocess.run(["ssh-keygen", "-lf", key], capture_output=True, text=True, check=True)
    assert error.what == "the SSH key of a is not known"
    assert shown.stdout.split()[1] in error.why
    # The end of the remedy is what a person would paste.
    _, _, command = error.remedy.partition("then: ")
    subprocess.run(["sh", "-c", command], check=True)
    ask(entry)


def test_a_changed_key_is_refused_loudly(server: Sshd, tmp_path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "k")], check=True
    )
    other = (tmp_path / "k.pub").read_text().split()[1]
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.1]:{server.port} ssh-ed25519 {other}\n")
    # People who have switched the check off are protected too.
    lines = (f"UserKnownHostsFile {known}", "StrictHostKeyChecking no")
    mine = config(server, tmp_path / "config", *lines)
    error = refusal(at(server.entry("a", tmp_path), config=mine))
    assert "HAS CHANGED" in error.what
    assert "SHA256:" in error.why
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}'" in error.remedy


def test_a_key_that_the_host_does_not_take(server: Sshd, tmp_path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "k")], check=True
    )
    mine = tmp_path / "config"
    mine.write_text(server.config.read_text().replace(str(server.key), str(tmp_path / "k")))
    error = refusal(at(server.entry("a", tmp_path), config=mine))
    assert error.what == f"a does not let {getpass.getuser()}@127.0.0.1 in"
    assert "ssh-copy-id" in error.remedy


def test_a_key_with_a_passphrase_wants_an_agent(server: Sshd, tmp_path: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret words", "-f", str(tmp_path / "k")]
    subprocess.run(words, check=True)
    mine = tmp_path / "config"
    mine.write_text(server.config.read_text().replace(str(server.key), str(tmp_path / "k")))
    assert "ssh-add" in refusal(at(server.entry("a", tmp_path), config=mine)).remedy


def test_a_user_that_is_not_there(server: Sshd, tmp_path: Path) -> None:
    error = refusal(at(server.entry("a", tmp_path), user="nobody-at-all"))
    assert error.what == "a does not let nobody-at-all@127.0.0.1 in"


def test_a_name_that_nobody_knows(server: Sshd, tmp_path: Path) -> None:
    error = refusal(at(server.entry("a", tmp_path), host="nowhere.invalid"))
    assert "the name 'nowhere.invalid' cannot be resolved" in error.why


def test_a_name_that_cannot_be_one(server: Sshd, tmp_path: Path) -> None:
    error = refusal(at(server.entry("a", tmp_path), host="x" * 64 + ".invalid"))
    assert "is not a name of a host" in error.why


@pytest.mark.parametrize("command", ["/gone/proxy %h", "nc 'unclosed"])
def test_a_proxy_command_that_does_not_start(server: Sshd, tmp_path: Path, command: str) -> None:
    mine = config(server, tmp_path / "config", f"ProxyCommand {command}")
    error = refusal(at(server.entry("a", tmp_path), config=mine))
    assert "its ProxyCommand" in error.why
    assert "does not start" in error.why


def test_a_host_with_damaged_settings_keeps_no_other_back(server: Sshd, tmp_path: Path) -> None:
    async def play() -> None:
        good = server.entry("a", tmp_path)
        hosts = [reach(at(good, config=tmp_path / "gone")), reach(good)]
        try:
            answers = await ask_every(hosts, lambda host: host.exists(tmp_path))
        finally:
            for host in hosts:
                await host.close()
        assert answers.given == [True]
        assert [error.kind for error in answers.silent] == ["usage"]

    asyncio.run(play())


def test_damaged_lines_of_known_hosts_keep_nobody_back(server: Sshd, tmp_path: Path) -> None:
    key = server.host_line.split()[2]
    known = tmp_path / "known"
    lines = [
        b"# a comment",
        b"\xff\xfe",
        b"other ssh-ed25519 AAAAC",
        f"other ssh-ed25519 {key[:-8]}".encode(),
        f"other ssh-rsa {key}".encode(),
        f"|1|c2hvcnQ=|c2hvcnQ= ssh-ed25519 {key}".encode(),
        f"@cert-authority *.example ssh-ed25519 {key}".encode(),
    ]
    entry = at(server.entry("a", tmp_path), config=config_knowing(server, tmp_path, known))
    known.write_bytes(b"\n".join([*lines, server.host_line.encode()]))
    ask(entry)
    known.write_bytes(b"\n".join(lines))
    assert refusal(entry).what == "the SSH key of a is not known"


@pytest.mark.parametrize("hashed", [True, False])
def test_any_of_several_keys_of_a_host_will_do(
    server: Sshd, tmp_path: Path, *, hashed: bool
) -> None:
    """An outdated line before the right one: THE SSH KEY HAS CHANGED, and ssh(1) logged in."""
    output = tmp_path / "old"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", output], check=True)
    name, kind, _ = server.host_line.split()
    outdated = f"{name} {kind} {(tmp_path / 'old.pub').read_text().split()[1]}\n"
    known = tmp_path / "known"
    mine = config_knowing(server, tmp_path, known)
    for text, is_known in ((outdated + server.host_line, True), (outdated * 2, False)):
        known.write_text(text)
        if hashed:
            subprocess.run(["ssh-keygen", "-H", "-f", known], check=True, capture_output=True)
        entry = at(server.entry("a", tmp_path), config=mine)
        if is_known:
            ask(entry)
        else:
            assert "HAS CHANGED" in refusal(entry).what


def test_a_revoked_key_is_refused(server: Sshd, tmp_path: Path) -> None:
    kind, key = server.host_line.split()[1:]
    known = tmp_path / "known"
    known.write_text(f"{server.host_line}@revoked * {kind} {key}\n")
    mine = config_knowing(server, tmp_path, known)
    error = refusal(at(server.entry("a", tmp_path), config=mine))
    assert "IS REVOKED" in error.what


def config_knowing(server: Sshd, tmp_path: Path, known: Path) -> Path:
    return config(server, tmp_path / "config", f"UserKnownHostsFile {known}")


def test_a_server_that_starts_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_START_TIMEOUT_S", 1.0)
    with sshd(tmp_path / "sshd") as frozen:

        async def play() -> None:
            def log_in_and_freeze(name: str, address: Address) -> Login:
                login = log_in(name, address)
                for pid in frozen.sessions():
                    os.kill(pid, signal.SIGSTOP)
                return login

            monkeypatch.setattr(wire, "log_in", log_in_and_freeze)
            entry = frozen.entry("a", tmp_path)
            with pytest.raises(HostDownError, match="a refuses to run a command"):
                await wire.open_wire("a", entry.address, entry.vmckpt)

        asyncio.run(play())
        frozen.cut()


def test_a_port_where_nobody_listens(server: Sshd, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    error = refusal(at(server.entry("a", tmp_path), port=port))
    assert error.why == f"nothing listens on port {port} of 127.0.0.1"


def test_a_network_without_a_way_there(server: Sshd, tmp_path: Path) -> None:
    # The limited broadcast address is no one's.
    error = refusal(at(server.entry("a", tmp_path), host="255.255.255.255"))
    assert "255.255.255.255 cannot be reached" in error.why


def test_a_server_that_stays_silent_is_given_up(server: Sshd, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mine = config(server, tmp_path / "config", "ConnectTimeout 1")
        entry = at(server.entry("a", tmp_path), port=silent.getsockname()[1], config=mine)
        error = refusal(entry)
    assert error.what == "the SSH server of a does not answer like one"


def packet(payload: bytes) -> bytes:
    """A message before encryption (RFC 4253, 6)."""
    padding = 16 - (len(payload) + 5) % 8
    return struct.pack(">IB", len(payload) + padding + 1, padding) + payload + bytes(padding)


def text(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


METHODS = [b"curve25519-sha256@libssh.org", b"ssh-ed25519", *[b"aes128-ctr"] * 2,
           *[b"hmac-sha2-256"] * 2, b"none", b"none", b"", b""]  # fmt: skip


def offer(methods: list[bytes]) -> bytes:
    return packet(b"\x14" + bytes(16) + b"".join(map(text, methods)) + bytes(5))


def reply(key: bytes, point: bytes, signature: bytes) -> bytes:
    return packet(b"\x1f" + text(text(b"ssh-ed25519") + text(key)) + text(point) + text(signature))


@pytest.mark.parametrize(
    "messages",
    [
        [offer([b"\xff", *METHODS[1:]])],
        [packet(b"\x01" + struct.pack(">I", 2) + text(b"\xff") + text(b""))],
        [offer(METHODS), packet(b"\x1f")],
        [offer(METHODS), reply(b"short", b"\2" * 32, b"none")],
        [offer(METHODS), reply(b"\1" * 32, bytes(32), b"none")],
        [offer(METHODS), reply(b"\1" * 32, b"\x09" + bytes(31), text(b"ssh-ed25519") + text(b"x"))],
    ],
    ids=["names", "reason", "empty", "key", "point", "signature"],
)
def test_a_server_that_talks_nonsense_is_a_host_that_does_not_answer(
    server: Sshd, tmp_path: Path, messages: list[bytes]
) -> None:
    """Each was a bug of vmckpt's, which ended every command on the VMs of all hosts."""

    def talk(listening: socket.socket) -> None:
        with listening.accept()[0] as sock, suppress(OSError):
            sock.sendall(b"SSH-2.0-x\r\n")
            for message in messages:
                sock.recv(1 << 16)
                sock.sendall(message)
            while sock.recv(1 << 16):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=talk, args=(listening,), daemon=True).start()
        error = refusal(at(server.entry("a", tmp_path), port=listening.getsockname()[1]))
    assert error.what == "the SSH server of a does not answer like one"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7), ("1m", 60), ("1h30M5", 5405), ("none", 10), ("0", 10), ("999w", 86400)],
)
def test_times_are_read_as_ssh_reads_them(tmp_path: Path, text: str, seconds: float) -> None:
    mine = tmp_path / "config"
    mine.write_text(f"ConnectTimeout {text}\n")
    assert read_settings(Address("a", "me", None, mine)).timeout_s == seconds


@pytest.mark.parametrize(
    "line", ["ConnectTimeout inf", "ConnectTimeout 1y", "UserKnownHostsFile ~no-one-has-it/known"]
)
def test_settings_that_mean_nothing_are_refused(tmp_path: Path, line: str) -> None:
    mine = tmp_path / "config"
    mine.write_text(f"{line}\n")
    with pytest.raises(UsageError, match="cannot be used"):
        read_settings(Address("a", "me", None, mine))


def transports() -> int:
    return sum(type(one).__name__ == "Transport" for one in threading.enumerate())


def test_a_far_side_that_hangs_keeps_no_connection(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its storage is silent. A service that asks again and again had no descriptors left."""
    monkeypatch.setattr(wire, "_LAST_WORDS_S", 0.5)
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\ntrap '' HUP TERM\nprintf started\nexec sleep 60 </dev/null\n")
    hangs.chmod(0o755)
    before = transports()

    async def play() -> None:
        entry = server.entry("a", tmp_path)
        connection = await wire.open_wire("a", entry.address, str(hangs))
        assert await connection.reader.readexactly(7) == b"started"
        assert transports() == before + 1
        connection.writer.transport.abort()
        await connection.writer.wait_closed()

    asyncio.run(play())
    eventually(lambda: transports() == before)


def test_without_a_free_descriptor_the_limit_is_named(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, before = server.entry("a", tmp_path), transports()
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def fail(*_: object) -> None:
        raise full

    with monkeypatch.context() as patch, pytest.raises(HostDownError) as caught:
        patch.setattr(socket, "create_connection", fail)
        log_in("a", entry.address)
    assert "ulimit -n" in caught.value.remedy
    wires = SimpleNamespace(socketpair=fail, socket=socket.socket)
    monkeypatch.setattr(wire, "socket", wires)
    with pytest.raises(HostDownError, match="cannot connect to a from here"):
        asyncio.run(wire.open_wire("a", entry.address, entry.vmckpt))
    eventually(lambda: transports() == before)


def test_a_host_without_vmckpt(server: Sshd, tmp_path: Path) -> None:
    error = refusal(replace(server.entry("a", tmp_path), vmckpt="/gone/vmckpt"))
    assert error.what == "there is no vmckpt on a"
    assert "/gone/vmckpt" in error.why
    assert "--vmckpt" in error.remedy


def test_a_vmckpt_that_does_not_start(server: Sshd, tmp_path: Path) -> None:
    broken = tmp_path / "vmckpt"
    broken.write_text("#!/bin/sh\necho 'ImportError: no module' >&2\nexit 1\n")
    broken.chmod(0o755)
    error = refusal(replace(server.entry("a", tmp_path), vmckpt=str(broken)))
    assert error.what == "vmckpt on a does not answer"
    assert "it ended with 1; ImportError: no module" in error.why


def test_a_command_that_is_odd_is_one_word(server: Sshd, tmp_path: Path) -> None:
    odd = tmp_path / "a $(touch gone); vmckpt"
    odd.symlink_to(server.vmckpt)
    ask(replace(server.entry("a", tmp_path), vmckpt=str(odd)))


def test_a_host_out_of_disk_says_so(server: Sshd, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,mode=0700", "tmpfs", full], check=True)
    try:
        (full / "filler").write_bytes(bytes(4096))
        with pytest.raises(StorageError, match=r"cannot write .*/file on a: No space left"):
            ask(server.entry("a", full))
    finally:
        subprocess.run(["umount", full], check=True)


def test_a_user_without_rights_is_told_where(tmp_path: Path) -> None:
    with sshd(tmp_path / "sshd") as server:
        for name in (tmp_path.parent.parent, tmp_path.parent, tmp_path):
            name.chmod(0o755)
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o700)
        wrapper = as_nobody(tmp_path / "vmckpt", server.vmckpt)
        entry = replace(server.entry("a", closed / "state"), vmckpt=wrapper)
        with pytest.raises(StorageError, match="closed/state on a: Permission denied"):
            ask(entry)


def test_a_host_behind_a_jump_host(server: Sshd, tmp_path: Path) -> None:
    with sshd(tmp_path / "inner") as inner:
        known = tmp_path / "known"
        known.write_text(server.host_line + inner.host_line)
        mine = tmp_path / "config"
        user = getpass.getuser()
        mine.write_text(
            f"Host gate\n  HostName 127.0.0.1\n  Port {server.port}\n  IdentityFile {server.key}\n"
            f"Host inner\n  HostName 127.0.0.1\n  Port {inner.port}\n  IdentityFile {inner.key}\n"
            f"  ProxyJump {user}@gate\n"
            f"Host *\n  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n"
        )
        entry = replace(
            inner.entry("a", tmp_path / "state"), address=Address("inner", None, None, mine)
        )
        ask(entry)
        assert (tmp_path / "state/file").read_text() == "x"
        known.write_text(inner.host_line)
        error = refusal(entry)
        assert f"the SSH key of {user}@gate, the jump host of a, is not known" in error.what
    known.write_text(server.host_line + inner.host_line)
    error = refusal(entry)
    assert f"its jump host {user}@gate cannot connect to 127.0.0.1" in error.why


def test_a_configuration_that_cannot_be_read(server: Sshd, tmp_path: Path) -> None:
    entry = at(server.entry("a", tmp_path), config=tmp_path / "gone")
    with pytest.raises(UsageError, match=r"the SSH configuration for 127\.0\.0\.1 cannot be used"):
        ask(entry)


def test_a_cut_connection_is_opened_again(server: Sshd, tmp_path: Path) -> None:
    async def play() -> None:
        host = reach(server.entry("a", tmp_path))
        await host.require_up()
        before = server.sessions()
        server.cut()
        assert await host.exists(tmp_path)
        assert not set(before) & set(server.sessions())
        await host.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("text", "host", "user", "port"),
    [
        ("ssh://root@192.0.2.7:2222", "192.0.2.7", "root", 2222),
        ("ssh://db-1", "db-1", None, None),
        ("ops@db-1.example", "db-1.example", "ops", None),
        ("ssh://root@[2001:db8::7]:22/", "2001:db8::7", "root", 22),
    ],
)
def test_addresses_are_read(text: str, host: str, user: str | None, port: int | None) -> None:
    found = Address.parse(text)
    assert found == Address(host, user, port)
    assert Address.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    ["", "ssh://", "http://a", "ssh://a:0", "ssh://a:70000", "a b", "-oProxyCommand=x", "a/b"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not an address of a host"):
        Address.parse(text)
