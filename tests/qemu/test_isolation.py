"""An isolated guest sends nothing to anywhere, though its NIC is on QEMU's user-mode network."""

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kinds import VERSIONS
from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.hosts.local import LocalHost
from vmckpt.qemu.inside import query_networks
from vmckpt.qemu.monitor import session
from vmckpt.vm.inventory import read_vm

SILENT_S = 3.0
HEARD_S = 60.0


class Observer:
    """A UDP socket on this machine's loopback, which guests of `network = "user"` reach."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.port: int = sock.getsockname()[1]

    def senders(self, for_s: float) -> set[int]:
        """The source ports that packets come from within so long: each guest has its own."""
        self._drop()
        found, until_s = set[int](), time.monotonic() + for_s
        while (left_s := until_s - time.monotonic()) > 0:
            self._sock.settimeout(left_s)
            try:
                found.add(self._sock.recvfrom(64)[1][1])
            except TimeoutError:
                break
        return found

    def hears(self) -> bool:
        """Whether anything comes, sooner or later."""
        given_up_s = time.monotonic() + HEARD_S
        while time.monotonic() < given_up_s:
            if self.senders(0.5):
                return True
        return False

    def _drop(self) -> None:
        self._sock.setblocking(False)
        try:
            while True:
                self._sock.recv(64)
        except BlockingIOError:
            return


@contextmanager
def observer() -> Iterator[Observer]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield Observer(sock)


def cmdline(port: int) -> str:
    words = f"vk.id=1 vk.ip=10.0.2.15/24 vk.gw=10.0.2.2 vk.heartbeat=10.0.2.2:{port}"
    return f"console=ttyS0 quiet panic=-1 cryptomgr.notests {words}"


def spec(port: int) -> str:
    where = image()
    return f"""
name = "guest"
memory = "128M"
[boot]
kernel = "{where}/vmlinuz"
initrd = "{where}/initrd"
cmdline = "{cmdline(port)}"
[[nics]]
network = "user"
"""


def end(made: World, name: str) -> None:
    eventually(lambda: made.ok("vm", "show", name)["operation"] is None, 30, "its memory is there")
    made.ok("vm", "stop", name, "--force")
    assert made.qemus(name) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_copies_forks_and_a_guards_proof_send_nothing(version: str) -> None:
    with world(qemu(version)) as made, observer() as outside:
        made.ok("host", "set", "local", "--qemu", str(qemu(version)))
        file = made.shared / "guest.toml"
        file.write_text(spec(outside.port))
        made.ok("vm", "run", str(file), "--host", "local")
        assert outside.hears()
        asyncio.run(asyncio.sleep(1))
        taken = made.ok("checkpoint", "create", "guest", "--name", "point")
        # While a guard proves its checkpoint the guest itself is heard, and it alone.
        guarding = made.begin("guard", "guest", "--for", "1s", "--", "true")
        assert len(outside.senders(SILENT_S * 2)) == 1
        said, complaint = guarding.communicate(timeout=60)
        assert guarding.returncode == 0, (said, complaint)
        end(made, "guest")
        made.ok("vm", "rm", "guest")
        assert outside.senders(SILENT_S) == set()
        made.ok("checkpoint", "restore", taken["id"], "--as", "copy")
        made.ok("fork", taken["id"], "--count", "2", "--name", "f")
        assert all(len(made.qemus(name)) == 1 for name in ("copy", "f-1", "f-2"))
        assert outside.senders(SILENT_S) == set()
        for name in ("f-1", "f-2", "copy"):
            end(made, name)
        # It stays so when it starts again, until the operator says otherwise.
        made.ok("vm", "start", "copy")
        made.ok("checkpoint", "restore", taken["id"], "--network", "isolated")
        assert outside.senders(SILENT_S * 3) == set()
        end(made, "copy")
        made.ok("vm", "network", "copy", "plugged")
        made.ok("vm", "start", "copy")
        assert outside.hears()
        end(made, "copy")
        # The guests did send: one that is plugged is heard at once.
        made.ok("checkpoint", "restore", taken["id"], "--as", "loud", "--network", "plugged")
        assert outside.hears()
        for name in ("loud", "guest"):
            end(made, name)


def sender(port: int) -> list[str]:
    """A machine on user-mode networking whose guest sends to this machine."""
    return [
        "-nodefaults", "-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0,romfile=",
        "-kernel", f"{image()}/vmlinuz", "-initrd", f"{image()}/initrd", "-append", cmdline(port),
    ]  # fmt: skip


@contextmanager
def by_hand(made: World, version: str, machine: list[str]) -> Iterator[None]:
    """A QEMU as someone starts it on this machine; and its end."""
    where = made.state_dir
    argv = [str(qemu(version)), "-M", "q35,accel=tcg", "-m", "128M", "-display", "none", *machine]
    for number in range(2):
        argv += ["-qmp", f"unix:{where}/hand{number}.sock,server,nowait"]
    started = subprocess.Popen(argv, cwd=where, stdin=subprocess.DEVNULL)
    try:
        eventually((where / "hand1.sock").exists, 60, "the QEMU started by hand is up")
        yield
    finally:
        started.kill()
        started.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_an_adopted_vm_that_is_restored_isolated_sends_nothing(version: str) -> None:
    with world(qemu(version)) as made, observer() as outside:
        made.ok("host", "set", "local", "--qemu", str(qemu(version)))
        with by_hand(made, version, sender(outside.port)):
            sockets = [word for n in (0, 1) for word in ("--qmp", f"{made.state_dir}/hand{n}.sock")]
            made.ok("vm", "adopt", "hand", "--host", "local", *sockets)
            assert outside.hears()
            made.ok("checkpoint", "create", "hand", "--kind", "file", "--name", "whole")
            made.ok("vm", "rm", "hand")
        assert outside.senders(SILENT_S) == set()
        made.ok("checkpoint", "restore", "whole", "--host", "local", "--network", "isolated")
        assert len(made.qemus("hand")) == 1
        assert outside.senders(SILENT_S * 2) == set()
        end(made, "hand")
        made.ok("vm", "rm", "hand")
        made.ok("checkpoint", "restore", "whole", "--host", "local")
        assert outside.hears()
        end(made, "hand")


def networks(made: World) -> dict[str, str]:
    """QEMU's words on the networks of the VM "hand"."""

    async def ask() -> dict[str, str]:
        host = LocalHost("local", made.state_dir, "127.0.0.1")
        vm = await read_vm(host, "hand")
        assert vm
        async with session(await host.connect(vm.qemu.files.operator), "hand") as monitor:
            return await query_networks(monitor)

    return asyncio.run(ask())


def test_the_network_that_qemu_makes_by_itself_is_cut_off_too() -> None:
    with world(qemu("10.0")) as made:
        made.ok("host", "set", "local", "--qemu", str(qemu("10.0")))
        with by_hand(made, "10.0", []):
            made.ok(
                "vm", "adopt", "hand", "--host", "local", "--qmp", f"{made.state_dir}/hand0.sock"
            )
            before = networks(made)
            made.ok("checkpoint", "create", "hand", "--kind", "file", "--name", "whole")
            made.ok("vm", "rm", "hand")
        assert [words for words in before.values() if words.endswith("restrict=off")]
        for way, is_cut_off in (("isolated", True), ("plugged", False)):
            made.ok("checkpoint", "restore", "whole", "--host", "local", "--network", way)
            found = networks(made)
            assert sorted(found) != []
            assert is_cut_off != any(words.endswith("restrict=off") for words in found.values())
            end(made, "hand")
            made.ok("vm", "rm", "hand")
