"""The lab on the real kernel: what it makes works."""

import asyncio
import json
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.small_lab import PROGRAM, a_lab, a_state_dir, left
from vmckpt.errors import NotFoundError, RefusedError, UsageError
from vmckpt.lab import lab as labs
from vmckpt.lab.network import set_link, shape_link
from vmckpt.lab.processes import run, tool
from vmckpt.lab.sockets import bind_client, connect_guest, open_socket
from vmckpt.lab.state import Lab, read

MIB = 1 << 20


@pytest.fixture
def state_dir() -> Iterator[Path]:
    with a_state_dir() as path:
        yield path


async def transfer(lab: Lab, source: str, target: str, size_bytes: int, limit_s: float) -> float:
    """Seconds for `size_bytes` from one host to another over the migration network."""
    loop = asyncio.get_running_loop()
    address = lab.host(target).migration_address
    with (
        await open_socket(lab, lab.host(target).enter, "tcp") as listener,
        await open_socket(lab, lab.host(source).enter, "tcp") as client,
    ):
        listener.bind((address, 0))
        listener.listen()
        async with asyncio.timeout(limit_s):
            await loop.sock_connect(client, listener.getsockname())
            server, peer = await loop.sock_accept(listener)
            assert peer[0] == lab.host(source).migration_address
            with server:
                began_s = time.monotonic()
                sending = asyncio.ensure_future(loop.sock_sendall(client, bytes(size_bytes)))
                try:
                    received = 0
                    while received < size_bytes:
                        received += len(await loop.sock_recv(server, MIB))
                    return time.monotonic() - began_s
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)


def test_what_up_makes_is_what_read_finds_and_the_inventory_says(state_dir: Path) -> None:
    async def main() -> None:
        qemus = [PROGRAM, Path(tool("true"))]
        lab = await labs.up(state_dir, hosts=3, qemus=qemus)
        assert read(state_dir) == lab
        assert [host.name for host in lab.hosts] == ["lab-a", "lab-b", "lab-c"]
        assert [host.qemu for host in lab.hosts] == [*qemus, qemus[-1]]
        for number, host in enumerate(lab.hosts, start=1):
            entry = state_dir / "hosts" / f"{host.name}.json"
            assert stat.S_IMODE(entry.stat().st_mode) == 0o600
            assert stat.S_IMODE(host.state_dir.stat().st_mode) == 0o700
            assert json.loads(entry.read_text()) == {
                "kind": "local",
                "state_dir": str(state_dir / "lab" / host.name),
                "migration_address": f"10.77.1.{number}",
                "enter": list(host.enter),
                "qemu": str(host.qemu),
                "bridge": "br0",
                "heartbeats": str(lab.heartbeats),
                "second_address": f"10.77.2.{number}",
            }
        assert stat.S_IMODE(lab.heartbeats.stat().st_mode) == 0o600
        with pytest.raises(NotFoundError):
            lab.host("lab-d")
        removed = await labs.down(state_dir)
        assert (removed.hosts, removed.processes) == (3, 5)
        assert read(state_dir) is None

    asyncio.run(main())
    assert left(state_dir) == []


def test_entering_a_host_keeps_the_pid(state_dir: Path) -> None:
    async def main() -> None:
        async with a_lab(state_dir) as lab:
            for host in lab.hosts:
                process = await asyncio.create_subprocess_exec(*host.enter, "sleep", "60")
                await asyncio.sleep(0.2)
                assert Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n"
                inode = Path(f"/proc/{process.pid}/ns/net").stat().st_ino
                assert inode == Path(f"/proc/{host.holder.pid}/ns/net").stat().st_ino
                process.kill()
                await process.wait()

    asyncio.run(main())


def test_hosts_reach_one_another_and_only_over_ipv4(state_dir: Path) -> None:
    async def main() -> None:
        async with a_lab(state_dir) as lab:
            await transfer(lab, "lab-a", "lab-b", 4 * MIB, 5.0)
            await transfer(lab, "lab-b", "lab-a", 4 * MIB, 5.0)
            for enter in (lab.client_enter, *(host.enter for host in lab.hosts)):
                assert await run([*enter, tool("ip"), "-6", "address"], lab.directory) == ""

    asyncio.run(main())


def test_a_cut_link_stalls_and_a_mended_one_carries_again(state_dir: Path) -> None:
    async def main() -> None:
        async with a_lab(state_dir, hosts=3) as lab:
            await set_link(lab, "lab-b", up=False)
            with pytest.raises((TimeoutError, OSError)):
                await transfer(lab, "lab-a", "lab-b", MIB, 0.5)
            await transfer(lab, "lab-a", "lab-c", MIB, 5.0)
            await set_link(lab, "lab-b", up=True)
            await transfer(lab, "lab-a", "lab-b", MIB, 5.0)

    asyncio.run(main())


@pytest.mark.parametrize(("source", "target"), [("lab-a", "lab-b"), ("lab-b", "lab-a")])
def test_a_shaped_link_carries_its_rate_each_way(state_dir: Path, source: str, target: str) -> None:
    async def main() -> tuple[float, float]:
        async with a_lab(state_dir) as lab:
            await shape_link(lab, "lab-a", 20 * MIB)
            shaped_s = await transfer(lab, source, target, 16 * MIB, 10.0)
            await shape_link(lab, "lab-a", None)
            return shaped_s, await transfer(lab, source, target, 16 * MIB, 10.0)

    shaped_s, open_s = asyncio.run(main())
    assert 0.65 < shaped_s < 1.3, "16 MiB at 20 MiB/s, less the burst"
    assert open_s < 0.4


def test_the_client_reaches_what_is_on_a_hosts_bridge(state_dir: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with a_lab(state_dir) as lab:
            await with_address(lab, "lab-b", "10.77.0.12")
            with await open_socket(lab, lab.host("lab-b").enter, "tcp") as listener:
                listener.bind(("10.77.0.12", 7000))
                listener.listen()
                with await connect_guest(lab, "10.77.0.12", 7000) as client:
                    server, peer = await loop.sock_accept(listener)
                    server.close()
                    assert peer[0] == "10.77.0.254"
                    assert await loop.sock_recv(client, 1) == b""
            with pytest.raises(ConnectionRefusedError):
                await connect_guest(lab, "10.77.0.12", 7000)
            with pytest.raises((TimeoutError, OSError)):
                await connect_guest(lab, "10.77.0.99", 7000, timeout_s=0.2)

    asyncio.run(main())


async def with_address(lab: Lab, host: str, address: str) -> None:
    """Stands for a guest: a host's bridge itself on the guests' network."""
    add = [*lab.host(host).enter, tool("ip"), "address", "add", f"{address}/24", "dev", "br0"]
    await run(add, lab.directory)


async def ask(lab: Lab, request: dict[str, int]) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(lab.heartbeats))
    writer.write(json.dumps(request).encode() + b"\n")
    reply: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    await writer.wait_closed()
    return reply


def test_the_observer_tells_how_long_a_guest_was_silent(state_dir: Path) -> None:
    async def main() -> None:
        async with a_lab(state_dir) as lab:
            await with_address(lab, "lab-a", "10.77.0.11")
            assert await ask(lab, {"id": 7, "since_ns": 0}) == {"received": 0}
            with await open_socket(lab, lab.host("lab-a").enter, "udp") as guest:
                guest.connect(("10.77.0.254", 7700))

                async def beat(first: int, last: int) -> int:
                    for number in range(first, last):
                        now_ns = time.monotonic_ns()
                        guest.send(struct.pack("<4sIQQQ", b"VKHB", 7, number, now_ns, 0))
                        await asyncio.sleep(0.001)
                    return time.monotonic_ns()

                guest.send(b"not a heartbeat")
                since_ns = time.monotonic_ns()
                stopped_ns = await beat(0, 50)
                await asyncio.sleep(0.25)
                until_ns = await beat(60, 100)
            reply = await ask(lab, {"id": 7, "since_ns": since_ns, "until_ns": until_ns})
            assert (reply["received"], reply["lost"], reply["dropped"]) == (90, 10, 0)
            assert (reply["reordered"], reply["duplicated"]) == (0, 0)
            assert 250 <= reply["longest_gap_ms"] < 500
            assert abs(reply["gap_began_ns"] - stopped_ns) < 50e6
            assert [reply["gap_began_ns"], reply["longest_gap_ms"]] in reply["gaps_over_20ms"]
            assert since_ns <= reply["first_ns"] < reply["last_ns"] <= until_ns
            later = await ask(lab, {"id": 7, "since_ns": until_ns})
            assert later["received"] == 0
            assert later["longest_gap_ms"] > 0, "silent to the end of the window"

    asyncio.run(main())


def test_a_client_socket_can_be_bound(state_dir: Path) -> None:
    async def main() -> None:
        async with a_lab(state_dir, hosts=1) as lab:
            with await bind_client(lab, "10.77.0.254", 0) as made:
                assert made.getsockname()[0] == "10.77.0.254"

    asyncio.run(main())


def test_a_second_lab_is_refused_and_the_first_unharmed(state_dir: Path) -> None:
    async def main() -> None:
        async with a_lab(state_dir) as lab:
            with pytest.raises(RefusedError, match="a lab already"):
                await labs.up(state_dir, hosts=2, qemus=[PROGRAM])
            assert read(state_dir) == lab

    asyncio.run(main())


def test_two_labs_side_by_side_do_not_know_one_another(state_dir: Path) -> None:
    async def main() -> None:
        async with a_lab(state_dir / "one"), a_lab(state_dir / "two") as two:
            await labs.down(state_dir / "one")
            assert read(state_dir / "two") == two
            await transfer(two, "lab-a", "lab-b", MIB, 5.0)

    asyncio.run(main())


def test_a_bad_request_changes_nothing(state_dir: Path) -> None:
    async def main() -> None:
        for hosts, qemus in ((0, [PROGRAM]), (99, [PROGRAM]), (2, []), (2, [Path("/nowhere")])):
            with pytest.raises(UsageError):
                await labs.up(state_dir, hosts=hosts, qemus=qemus)
        with pytest.raises(RefusedError, match="cannot be made here"):
            await labs.up(state_dir / ("x" * 80), hosts=2, qemus=[PROGRAM])

    asyncio.run(main())
    assert left(state_dir) == []


def test_a_host_of_the_users_is_neither_overwritten_nor_removed(state_dir: Path) -> None:
    (state_dir / "hosts").mkdir()
    entry = state_dir / "hosts" / "lab-b.json"
    entry.write_text('{"kind": "local", "state_dir": "/elsewhere"}')

    async def main() -> None:
        with pytest.raises(RefusedError, match="'lab-b' is taken"):
            await labs.up(state_dir, hosts=2, qemus=[PROGRAM])
        async with a_lab(state_dir, hosts=1):
            pass

    asyncio.run(main())
    assert left(state_dir) == [str(entry)]


def test_sockets_belong_to_the_namespace_they_were_made_in(state_dir: Path) -> None:
    async def main() -> None:
        async with a_lab(state_dir, hosts=1) as lab:
            with await open_socket(lab, lab.hosts[0].enter, "udp") as made:
                made.bind(("10.77.1.1", 0))
            with (
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours,
                pytest.raises(OSError, match="Cannot assign"),
            ):
                ours.bind(("10.77.1.1", 0))

    asyncio.run(main())
