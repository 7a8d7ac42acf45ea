"""A probe in one network namespace sees when an address in another falls silent."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from tests.kinds import require_root
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.hosts.sockets.arp import watch
from vmckpt.migrate.steps.echo import Echo, begin

pytestmark = pytest.mark.contract
ADDRESS, MAC = "192.0.2.7", "52:54:00:77:00:07"


def ip(*words: str, namespace: str = "") -> None:
    inside = ["-n", namespace] if namespace else []
    subprocess.run(["ip", *inside, *words], check=True)


@pytest.fixture
def far() -> Iterator[tuple[str, str]]:
    """A link of this machine, and the namespace in which its other end answers."""
    require_root()
    near, namespace = f"vka{os.getpid()}", f"vkarp{os.getpid()}"
    ip("netns", "add", namespace)
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("link", "set", "eth0", "address", MAC, namespace=namespace)
        ip("addr", "add", f"{ADDRESS}/24", "dev", "eth0", namespace=namespace)
        ip("link", "set", "eth0", "up", namespace=namespace)
        ip("link", "set", near, "up")
        yield near, namespace
    finally:
        # The link would go with its namespace, but later: the next test makes one of its name.
        for words in (["link", "del", near], ["netns", "del", namespace]):
            with suppress(subprocess.CalledProcessError):
                ip(*words)


def seen(interface: str, for_s: float, mac: str = MAC) -> tuple[int, float, float]:
    until_s = time.monotonic() + for_s
    theirs = bytes.fromhex(mac.replace(":", ""))
    found = watch(interface, theirs, IPv4Address(ADDRESS), lambda _: time.monotonic() < until_s)
    return found.received, found.longest_gap_ms, found.silent_ms


def test_an_address_that_answers_is_heard_and_its_silence_measured(far: tuple[str, str]) -> None:
    near, namespace = far

    def fall_silent() -> None:
        time.sleep(0.3)
        began_s = time.monotonic()
        ip("addr", "del", f"{ADDRESS}/24", "dev", "eth0", namespace=namespace)
        time.sleep(0.2)
        ip("addr", "add", f"{ADDRESS}/24", "dev", "eth0", namespace=namespace)
        took_ms.append((time.monotonic() - began_s) * 1e3)

    took_ms = list[float]()
    silencer = threading.Thread(target=fall_silent)
    silencer.start()
    received, longest_ms, silent_ms = seen(near, 1.0)
    silencer.join()
    assert received > 20
    assert 190 <= longest_ms <= took_ms[0] + 100
    assert silent_ms >= longest_ms


def test_where_nobody_answers_nothing_is_heard(far: tuple[str, str]) -> None:
    near, _ = far
    with pytest.raises(TimeoutError, match="does not answer"):
        seen(near, 0.1, "52:54:00:77:00:08")


def test_one_that_leaves_the_network_is_not_a_silence(far: tuple[str, str]) -> None:
    """As a guest behind libvirt's NAT, whose network is another one on each host."""
    near, namespace = far
    goes = threading.Timer(0.2, ip, ["addr", "del", f"{ADDRESS}/24", "dev", "eth0"],
                           {"namespace": namespace})  # fmt: skip
    goes.start()
    with pytest.raises(TimeoutError, match="does not answer"):
        seen(near, 0.4)
    goes.join()


def test_an_interface_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="No such device"):
        seen("vk-nowhere", 0.1)


def test_the_output_of_a_probe_that_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "echo-killed.json").touch()
    running = tmp_path / "echo-running.json"
    probe = subprocess.Popen([sys.executable, "-c", "input()", str(running)], stdin=subprocess.PIPE)
    host = LocalHost("a", tmp_path, "127.0.0.1")
    try:
        running.touch()
        assert asyncio.run(begin(host, "web", "1", (), None)) is None
        assert [path.name for path in tmp_path.glob("echo-*")] == [running.name]
    finally:
        probe.kill()
        probe.communicate()


@pytest.mark.parametrize(
    ("printed", "why"),
    [("", "answered no ARP request"), ('{"why": "No such device"}\n', "No such device")],
)
def test_a_guest_that_does_not_answer_beforehand_is_not_measured(
    tmp_path: Path, printed: str, why: str
) -> None:
    out = tmp_path / "echo-1.json"
    out.write_text(printed)
    echo = Echo(LocalHost("a", tmp_path, "127.0.0.1"), ProcessId(0, 0), out)
    with pytest.raises(OperationFailedError, match=why):
        asyncio.run(echo.answered())


def test_a_guest_that_has_answered_may_be_moved(tmp_path: Path) -> None:
    out = tmp_path / "echo-1.json"
    out.write_text('{"answered": true}\n')
    echo = Echo(LocalHost("a", tmp_path, "127.0.0.1"), ProcessId(0, 0), out)
    assert asyncio.run(echo.answered()) is echo
