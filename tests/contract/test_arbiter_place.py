"""An arbiter that is lost with one of the two hosts is named at the start."""

import asyncio
from pathlib import Path

import pytest

from tests.faulty_host import Fault, FaultyHost
from vmckpt.hosts.local import LocalHost
from vmckpt.options.replication import ReplicationOptions
from vmckpt.preflight.finding import OK, WARN, Finding, ask
from vmckpt.preflight.replication.arbiter import arbiter_check, local_ipv4, local_ipv6

ROOT = "20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
NFS = "40 20 0:40 / /shared rw,relatime - nfs4 server:/x rw\n"
DISK = "41 20 8:2 / /shared rw,relatime - xfs /dev/sdb1 rw\n"
TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
Local:
        |-- 192.0.2.{n}
           /32 host LOCAL
        |-- 192.0.2.255
           /32 link BROADCAST
"""
IPV6 = "20010db80000000000000000000000{n:02x} 02 40 00 80     eth0\n"


def machine(name: str, number: int, shared: str = "") -> FaultyHost:
    """Another machine, by what its kernel says."""
    files = {
        "/proc/self/mountinfo": ROOT + shared,
        "/proc/net/fib_trie": TRIE.format(n=number),
        "/proc/net/if_inet6": f"{IPV6.format(n=number)}zz 02\n",
    }
    return FaultyHost(
        name,
        Path("/s"),
        f"198.51.100.{number}",
        second_address=f"203.0.113.{number}",
        is_this_machine=False,
        faults=(
            Fault("read_text", by=lambda path: files.get(str(path))),
            Fault("resolve", by=lambda path: path),
        ),
    )


def found(primary: LocalHost, standby: LocalHost, location: str) -> Finding:
    [found] = asyncio.run(ask(arbiter_check(primary, standby, ReplicationOptions(location))))
    return found


def test_a_directory_on_one_hosts_own_disk_is_named_with_what_follows() -> None:
    check = found(machine("a", 1, DISK), machine("b", 2, NFS), "/shared/leases")
    assert check.verdict == WARN
    assert "on a's own xfs" in check.reason
    assert "if a fails, b may not take over" in check.reason
    check = found(machine("a", 1, NFS), machine("b", 2, DISK), "/shared/leases")
    assert "on b's own xfs" in check.reason
    assert "if b fails, the guest is paused until `replicate stop`" in check.reason
    assert "may not take over" not in check.reason
    # What is not mounted anywhere is on the root's.
    assert "a's own ext4" in found(machine("a", 1), machine("b", 2, NFS), "/shared/x").reason


def test_a_directory_of_a_third_one_is_right() -> None:
    assert found(machine("a", 1, NFS), machine("b", 2, NFS), "/shared/leases").verdict == OK


@pytest.mark.parametrize(
    "url",
    [
        "http://192.0.2.1:2379",
        "http://198.51.100.1",
        "https://203.0.113.1:2379",
        "http://[2001:db8::1]:2379",
    ],
)
def test_a_single_etcd_on_a_host_is_named_by_whichever_address(url: str) -> None:
    check = found(machine("a", 1), machine("b", 2), f"etcd:{url}")
    assert check.verdict == WARN
    assert url in check.reason
    assert "on a" in check.reason
    assert "if a fails, b may not take over" in check.reason


def test_what_counts_is_whether_a_majority_is_left() -> None:
    hosts = machine("a", 1), machine("b", 2)
    on_a, on_b, third = (f"http://192.0.2.{n}:2379" for n in (1, 2, 3))
    assert found(*hosts, f"etcd:{on_a},{on_b},{third}").verdict == OK
    assert found(*hosts, f"etcd:{third}").verdict == OK
    check = found(*hosts, f"etcd:{on_a},{on_b}")
    assert "1 of the 2 members" in check.reason
    assert "if a fails" in check.reason
    assert "if b fails" in check.reason
    more = f"etcd:{on_a},http://192.0.2.1:3379,{third}"
    assert "2 of the 3 members" in found(*hosts, more).reason


def test_each_host_has_its_own_loopback() -> None:
    check = found(machine("a", 1), machine("b", 2), "etcd:http://127.0.0.1:2379")
    assert "if a fails" in check.reason
    assert "if b fails" in check.reason


def test_a_name_that_nobody_knows_is_on_no_host() -> None:
    assert found(machine("a", 1), machine("b", 2), "etcd:http://etcd.invalid:2379").verdict == OK


def test_on_one_machine_there_is_nothing_to_warn_of(tmp_path: Path) -> None:
    here, there = (LocalHost(name, tmp_path, "127.0.0.1") for name in "ab")
    assert found(here, there, str(tmp_path)).verdict == OK


def test_the_kernels_tables_are_read() -> None:
    for path, read in (
        (Path("/proc/net/fib_trie"), local_ipv4),
        (Path("/proc/net/if_inet6"), local_ipv6),
    ):
        if path.exists() and (text := path.read_text()):
            assert {"127.0.0.1", "::1"} & set(read(text))


def test_what_is_no_address_is_on_no_host() -> None:
    """`replicate start` said that vmckpt has a bug; the service names what is wrong with it."""
    check = found(machine("a", 1), machine("b", 2), "etcd:http://[2001:db8::1,http://x")
    assert check.verdict == OK
