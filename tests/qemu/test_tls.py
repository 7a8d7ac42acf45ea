"""Encrypted migrations: who is let in, what a stranger gets, and that nothing goes unencrypted."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.qemu.wire import captured
from tests.qemu.world import World, image, kill, loaded, qemu, world
from tests.waiting import eventually
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import find_host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.pki.ca import issue, make_ca
from vmckpt.hosts.pki.identity import pki_dir
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.migrate.outcome.ends import End, discard
from vmckpt.migrate.steps.encryption import arm, disarm
from vmckpt.migrate.steps.listen import listen, uri
from vmckpt.preflight.migration.encryption import Encryption, Scheme
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.paths import new_qemu_id, vm_dir
from vmckpt.vm.start import start_qemu

# Words that a guest with content=text holds by the ten thousand (images/guest/content.c).
WORDS = ("machine ", "fenced, ", "dirtied ")
# What each record on a guest's disk begins with (images/guest/records.c).
RECORD = "VKRECORD"
X509 = Encryption(Scheme.CERTIFICATES, "", peer="CN=lab-a")
# Connects as a source would; says whether the target let it in, or hung up.
CLIENT = """
import socket, ssl, sys
address, port, ca, certificate, key = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
if certificate:
    context.load_cert_chain(certificate, key)
try:
    with socket.create_connection((address, int(port)), 5) as plain:
        with context.wrap_socket(plain, server_hostname=address) as secure:
            secure.settimeout(1.5)
            print("refused" if secure.recv(1) == b"" else "accepted")
except TimeoutError:
    print("accepted")
except OSError as exc:
    print("refused", exc)
"""


NEW, OLD = "10.0 10.0", "10.0 7.2"
BOTH = pytest.mark.parametrize("pair", [NEW, OLD], indirect=True)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[World]:
    """A guest on the first QEMU, which can move to the second."""
    first, second = (asked := getattr(request, "param", NEW)).split()
    machine = "pc-q35-7.2" if asked == OLD else "q35"
    with world(qemu(first), qemu(second)) as made:
        made.run_guest(LabGuest("mover", 1, image(), machine=machine, memory="192M"), "lab-a")
        yield made


@pytest.fixture
def certified(pair: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Both hosts have good certificates; afterwards there are none and no authority."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(pair.state_dir))
    make_ca(pair.state_dir)
    for name in ("lab-a", "lab-b"):
        asyncio.run(issue(pair.state_dir, find_host(name)))
    yield pair
    forget(pair)


def forget(made: World) -> None:
    for path in (
        made.state_dir,
        made.lab.host("lab-a").state_dir,
        made.lab.host("lab-b").state_dir,
    ):
        shutil.rmtree(path / "pki", ignore_errors=True)


@asynccontextmanager
async def waiting() -> AsyncIterator[tuple[End, End]]:
    """The VM's QEMU on lab-a, and one on lab-b that waits for it; the VM stays where it is."""
    a, b = find_host("lab-a"), find_host("lab-b")
    vm = await read_vm(a, "mover")
    assert vm is not None
    source = End(a, vm.qemu.files)
    target = End(b, vm_dir(b.state_dir, "mover").qemu(new_qemu_id()))
    _, waiting_monitor = await start_qemu(b, vm.spec, vm.qemu.platform, target.files, incoming=True)
    target.adopt(waiting_monitor)
    for end in (source, target):
        await commands.migrate_set_capabilities(await end.monitor(), {"return-path": True})
    try:
        yield source, target
        assert (await commands.query_status(await source.monitor())).running
        assert not await target.ever_ran()
    finally:
        await disarm(source)
        await source.close()
        await discard(target, vm.spec.ram_dir)
        await b.remove(vm_dir(b.state_dir, "mover").path)


async def outcome(source: End, where: str) -> str:
    """How a migration from the source ends."""
    monitor = await source.monitor()
    await commands.migrate(monitor, where)
    with monitor.events("MIGRATION") as events:
        while not (status := await commands.query_migrate(monitor)).ended:
            await events.next(0.1)
    return status.status


async def issue_expired(state: Path, host: Host) -> None:
    await issue(state, host, days=0)
    await asyncio.sleep(1.1)


async def identity_of(kind: str, made: World, directory: Path) -> tuple[str, str]:
    """Certificate and key of a stranger, or of the source itself."""
    state, address = made.state_dir, "10.77.1.1"
    if kind == "rightful":
        directory = pki_dir(find_host("lab-a"))
    elif kind == "none":
        return "", ""
    else:
        if kind == "another authority":
            state = directory / "other"
            make_ca(state)
        name = "lab-c" if kind == "another host" else "lab-a"
        stranger = LocalHost(name, directory, address)
        if kind == "expired":
            await issue_expired(state, stranger)
        else:
            await issue(state, stranger)
        directory = pki_dir(stranger)
    return str(directory / "client-cert.pem"), str(directory / "client-key.pem")


async def answer(host: Host, where: str, identity: tuple[str, str]) -> str:
    """What the QEMU that listens at `where` says to a TLS client with this certificate and key."""
    _, address, port = where.split(":")
    ca = str(pki_dir(host) / "ca-cert.pem")
    said = await host.run([sys.executable, "-c", CLIENT, address, port, ca, *identity])
    assert said.stdout, said.stderr
    return said.stdout.split()[0]


@BOTH
@pytest.mark.parametrize(
    "kind", ["rightful", "none", "another authority", "expired", "another host"]
)
def test_the_target_lets_only_the_source_in(certified: World, tmp_path: Path, kind: str) -> None:
    async def knock() -> None:
        async with waiting() as (source, target):
            await arm(source, target, X509, "r1")
            port = await listen(await target.monitor(), target.host)
            stranger = await identity_of(kind, certified, tmp_path)
            expected = "accepted" if kind == "rightful" else "refused"
            assert await answer(source.host, uri(target.host, port), stranger) == expected
            if kind != "rightful":
                # The target goes on waiting for the source.
                rightful = await identity_of("rightful", certified, tmp_path)
                assert await answer(source.host, uri(target.host, port), rightful) == "accepted"

    asyncio.run(knock())


@BOTH
def test_a_source_that_would_send_in_clear_is_not_let_in(certified: World) -> None:
    async def knock() -> None:
        async with waiting() as (source, target):
            await arm(source, target, X509, "r1")
            await disarm(source)
            port = await listen(await target.monitor(), target.host)
            assert await outcome(source, uri(target.host, port)) == "failed"

    asyncio.run(knock())
    assert certified.ok("vm", "show", "mover")["state"] == "running"


@BOTH
@pytest.mark.parametrize("wrong", ["authority", "address"])
def test_the_source_sends_nothing_to_a_target_it_does_not_know(
    certified: World, tmp_path: Path, wrong: str
) -> None:
    destination_host, state = find_host("lab-b"), certified.state_dir
    if wrong == "authority":
        state = tmp_path
        make_ca(state)
    address = "10.77.1.99" if wrong == "address" else destination_host.migration_address
    asyncio.run(issue(state, LocalHost("lab-b", destination_host.state_dir, address)))

    async def send() -> None:
        async with waiting() as (source, target):
            await arm(source, target, X509, "r1")
            port = await listen(await target.monitor(), target.host)
            with captured(certified.lab.host("lab-a"), *WORDS) as wire:
                assert await outcome(source, uri(target.host, port)) == "failed"
            assert wire.in_clear == 0
            assert wire.bytes < 1 << 20

    asyncio.run(send())


def test_an_expired_certificate_is_not_even_loaded(certified: World) -> None:
    asyncio.run(issue_expired(certified.state_dir, find_host("lab-b")))

    async def try_it() -> None:
        async with waiting() as (source, target):
            with pytest.raises(OperationFailedError, match="cannot be encrypted") as failed:
                await arm(source, target, X509, "r1")
            assert "expired" in failed.value.why
            await disarm(source)
            assert await armed(source) == {}

    asyncio.run(try_it())


async def armed(end: End) -> dict[str, str]:
    """What the QEMU has of any encryption."""
    monitor = await end.monitor()
    parameters = await commands.query_migrate_parameters(monitor)
    found = {name: value for name, value in parameters.items() if "tls" in name and value}
    objects = [name for name in await commands.query_objects(monitor) if name.startswith("vmckpt")]
    return found | dict.fromkeys(objects, "object")


async def disarmed(*ends: End) -> None:
    for end in ends:
        await disarm(end)
        assert await armed(end) == {}
        assert not (end.files.path / "tls").exists()


@BOTH
def test_what_an_earlier_migration_left_is_swept_away(certified: World) -> None:
    async def twice() -> None:
        async with waiting() as (source, target):
            await arm(source, target, X509, "r1")
            await disarmed(source, target)
            await arm(source, target, Encryption(Scheme.ONE_TIME_KEY, ""), "r2")
            assert await armed(source) == {"tls-creds": "vmckpt-tls-r2", "vmckpt-tls-r2": "object"}
            await disarmed(source, target)

    asyncio.run(twice())


def test_ports_of_the_range_are_tried_in_turn(
    certified: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = certified.state_dir / "hosts" / "lab-b.json"
    before = entry.read_text()
    hold = (
        "import socket,sys\ns=socket.create_server((sys.argv[1],50000))\nprint(flush=True);input()"
    )
    enter = certified.lab.host("lab-b").enter
    entry.write_text(json.dumps(json.loads(before) | {"migration_ports": [50000, 50001]}))
    try:
        with subprocess.Popen(
            [*enter, sys.executable, "-c", hold, "10.77.1.2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder:
            assert holder.stdout
            holder.stdout.readline()
            asyncio.run(listens_at(50001))
            entry.write_text(json.dumps(json.loads(before) | {"migration_ports": [50000, 50000]}))
            with pytest.raises(OperationFailedError) as full:
                asyncio.run(listens_at(0))
            holder.communicate(b"\n")
        assert "50000 to 50000" in full.value.why
        assert "migration_ports" in full.value.remedy
    finally:
        entry.write_text(before)


async def listens_at(port: int) -> None:
    async with waiting() as (_, target):
        assert await listen(await target.monitor(), target.host) == port


MOVES = {
    "precopy": ["--method", "precopy"],
    "parallel": ["--method", "precopy", "--parallel", "3"],
    "compressed": ["--method", "precopy", "--compress", "zstd"],
    "postcopy": ["--method", "postcopy"],
    "one-time key": ["--method", "precopy", "--tls", "psk"],
    "one-time key in parallel": ["--method", "precopy", "--tls", "psk", "--parallel", "3"],
}


@pytest.mark.parametrize(
    ("pair", "way"),
    [*((NEW, way) for way in MOVES), (OLD, "precopy"), (OLD, "postcopy")],
    indirect=["pair"],
)
def test_nothing_of_the_guest_is_seen_on_the_wire(certified: World, way: str) -> None:
    guest = LabGuest("mover", 1, image())
    link = certified.lab.host("lab-a")
    scheme = "psk" if "psk" in MOVES[way] else "x509"

    async def there_and_back() -> None:
        async with loaded(certified, guest) as control:
            await control.load_memory("rate=10M set=32M content=text")
            for source, target in (("lab-a", "lab-b"), ("lab-b", "lab-a")):
                # QEMU 7.2 under TCG cannot track dirty pages.
                old = "7.2" in str(certified.lab.host(source).qemu)
                words = ["--method", "stop", "--tls", "psk"] if old else MOVES[way]
                with captured(link, *WORDS) as wire:
                    moved = await asyncio.to_thread(
                        certified.ok, "migrate", "mover", target, *words
                    )
                assert moved["encryption"] == ("psk" if old else scheme)
                assert (wire.in_clear, wire.missed) == (0, 0), wire
                assert wire.bytes > 16 << 20
                assert await left_on(target) == {}

    asyncio.run(there_and_back())


async def left_on(host: str) -> dict[str, str]:
    """What the VM's QEMU still has of the encryption after it has come here."""
    vm = await read_vm(find_host(host), "mover")
    assert vm is not None
    end = End(vm.host, vm.qemu.files)
    try:
        assert not (end.files.path / "tls").exists()
        return await armed(end)
    finally:
        await end.close()


async def leave_credentials(host: str) -> None:
    """Have the VM's QEMU as a move does whose command and dead-man's switch were both killed."""
    vm = await read_vm(find_host(host), "mover")
    assert vm is not None
    end = End(vm.host, vm.qemu.files)
    monitor = await end.monitor()
    values = {"dir": str(pki_dir(vm.host)), "endpoint": "client", "verify-peer": True}
    await commands.object_add(monitor, "tls-creds-x509", "vmckpt-tls-old", values)
    await commands.migrate_set_parameters(monitor, {"tls-creds": "vmckpt-tls-old"})
    await end.close()


def test_without_encryption_the_guest_is_seen_on_the_wire(certified: World) -> None:
    """The capture sees what there is; and credentials that were left behind encrypt nothing."""
    guest = LabGuest("mover", 1, image())
    link = certified.lab.host("lab-a")

    async def there_and_back() -> None:
        async with loaded(certified, guest) as control:
            await control.load_memory("rate=20M set=48M content=text")
            await asyncio.to_thread(certified.ok, "migrate", "mover", "lab-b", "--method", "stop")
            await leave_credentials("lab-b")
            with captured(link, *WORDS) as wire:
                words = ["migrate", "mover", "lab-a", "--tls", "off", "--method", "stop"]
                moved = await asyncio.to_thread(certified.ok, *words)
            assert moved["encryption"] == "off"
            assert all(count > 10_000 for count in wire.words.values()), wire

    asyncio.run(there_and_back())


def spoil(made: World, how: str, directory: Path) -> None:
    host, directory_b = find_host("lab-b"), pki_dir(find_host("lab-b"))
    match how:
        case "expired":
            asyncio.run(issue_expired(made.state_dir, host))
        case "another authority":
            make_ca(directory)
            asyncio.run(issue(directory, host))
        case "another address":
            moved = LocalHost("lab-b", host.state_dir, "10.77.1.99")
            asyncio.run(issue(made.state_dir, moved))
        case "missing":
            shutil.rmtree(directory_b)
        case "in pieces":
            (directory_b / "server-key.pem").unlink()
        case "damaged":
            (directory_b / "server-cert.pem").write_text("nonsense")


@pytest.mark.parametrize(
    "how",
    ["expired", "another authority", "another address", "missing", "in pieces", "damaged"],
)
def test_a_host_without_good_certificates_is_refused_beforehand(
    certified: World, tmp_path: Path, how: str
) -> None:
    spoil(certified, how, tmp_path)
    for options in ([], ["--tls", "require"]):
        checked = certified.vmckpt("migrate", "mover", "lab-b", "--dry-run", *options)
        verdicts = {check["code"]: check for check in checked.result["targets"][0]["checks"]}
        assert (checked.code, verdicts["tls"]["verdict"]) == (4, "refuse")
        assert "vmckpt pki issue" in verdicts["tls"]["remedy"]
    refused = certified.vmckpt("migrate", "mover", "lab-b")
    assert refused.code == 4
    assert "[tls]" in refused.error["why"]
    assert certified.files("lab-b") == []
    assert len(certified.qemus("mover")) == 1


def test_only_hosts_of_one_machine_without_certificates_move_in_clear_unasked(
    certified: World,
) -> None:
    forget(certified)
    checked = certified.ok("migrate", "mover", "lab-b", "--dry-run")
    [tls] = [check for check in checked["targets"][0]["checks"] if check["code"] == "tls"]
    assert tls["verdict"] == "ok"
    assert "not encrypted" in tls["reason"]
    refused = certified.vmckpt("migrate", "mover", "lab-b", "--tls", "require")
    assert refused.code == 4
    assert "vmckpt pki issue lab-a lab-b" in refused.error["remedy"]


def test_a_move_that_fails_leaves_no_credentials(certified: World) -> None:
    entry = certified.state_dir / "hosts" / "lab-b.json"
    before = entry.read_text()
    # Not an address of lab-b: its QEMU cannot listen there, which shows when all is armed.
    entry.write_text(json.dumps(json.loads(before) | {"migration_address": "10.77.1.77"}))
    try:
        asyncio.run(issue(certified.state_dir, find_host("lab-b")))
        failed = certified.vmckpt("migrate", "mover", "lab-b")
        assert failed.code == 7
        assert "10.77.1.77" in failed.error["what"]
        assert asyncio.run(left_on("lab-a")) == {}
        assert certified.files("lab-b") == []
    finally:
        entry.write_text(before)


def test_the_commands_of_pki(pair: World) -> None:
    forget(pair)
    try:
        assert pair.vmckpt("pki", "issue", "lab-a").code == 3
        ca = pair.ok("pki", "init")
        assert pair.vmckpt("pki", "init").code == 4
        issued = pair.ok("pki", "issue", "lab-a", "lab-b", "--days", "20")["hosts"]
        assert [host["names"] for host in issued] == [
            ["10.77.1.1", "lab-a"],
            ["10.77.1.2", "lab-b"],
        ]
        shown = pair.ok("pki", "show")
        assert shown["authority"] == ca
        states = {host["host"]: host["state"] for host in shown["hosts"]}
        assert states == {"local": "none", "lab-a": "ends soon", "lab-b": "ends soon"}
        assert pair.vmckpt("pki", "issue", "nobody").code == 3
    finally:
        forget(pair)


def test_local_disks_travel_encrypted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = LabGuest("local", 2, image(), disk="40M")
    with world(qemu("10.0"), qemu("10.0")) as made:
        monkeypatch.setenv("VMCKPT_STATE_DIR", str(made.state_dir))
        spec = made.state_dir / "local.toml"
        spec.write_text(guest.spec().replace('path = "local.', 'image = "local.'))
        made.ok("vm", "run", str(spec), "--host", "lab-a")
        made.ok("pki", "init")
        made.ok("pki", "issue", "lab-a", "lab-b")

        async def there_and_back() -> None:
            async with loaded(made, guest):
                await asyncio.sleep(3.0)
                seen = []
                for target, tls in (("lab-b", "require"), ("lab-a", "off")):
                    with captured(made.lab.host("lab-a"), RECORD) as wire:
                        words = ["migrate", "local", target, "--tls", tls, "--disks", "copy"]
                        await asyncio.to_thread(made.ok, *words)
                    seen.append(wire.in_clear)
                assert seen[0] == 0
                assert seen[1] > 500

        asyncio.run(there_and_back())


def test_recovery_takes_the_credentials_away(certified: World) -> None:
    journal = certified.lab.host("lab-a").state_dir / "vms/mover/migration.json"
    command = certified.begin("migrate", "mover", "lab-b", "--bandwidth", "5MB")
    began = '"step": "transfer"'
    eventually(lambda: journal.exists() and began in journal.read_text(), 30, "memory moves")
    used = asyncio.run(creds_in_use(find_host("lab-a")))
    kill(command)
    # The command's dead-man's switch may have been quicker.
    certified.vmckpt("migrate", "--recover", "mover")
    assert used.startswith("vmckpt-tls-")
    assert certified.ok("vm", "show", "mover")["host"] == "lab-a"
    assert asyncio.run(left_on("lab-a")) == {}
    assert certified.files("lab-b") == []


async def creds_in_use(host: Host) -> str:
    """The VM's QEMU's `tls-creds`, asked beside the command that works with it."""
    vm = await read_vm(host, "mover")
    assert vm is not None
    monitor = await Monitor.connect(await host.connect(vm.qemu.files.onlooker), "mover")
    try:
        return str((await commands.query_migrate_parameters(monitor))["tls-creds"])
    finally:
        await monitor.close()
