"""Every way in which a domain can move: what libvirt's QEMUs are told, and nothing is lost."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.qemu.world import loaded, qemu
from tests.real.domains import GUEST, HOSTS, log, remove_domain, row, run_domain, secure, states
from tests.real.machines import Machines, machines

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
NBD_PORT = 10809
SLOWLY = ("--bandwidth", "10MiB/s", "--timeout", "2s", "--on-timeout")
# Options, the method that the report names, and what the source's QEMU is told.
WAYS = {
    "hybrid": (("--method", "hybrid"), "precopy", '{"capability":"postcopy-ram","state":true}'),
    "stop": (("--method", "stop"), "stop", '"execute":"stop"'),
    "parallel": (("--parallel", "2"), "precopy", '"multifd-channels":2'),
    "zstd": (("--compress", "zstd"), "precopy", '"multifd-compression":"zstd"'),
    "auto-converge": (
        ("--method", "precopy", "--auto-converge"),
        "precopy",
        '{"capability":"auto-converge","state":true}',
    ),
    "postcopy in the end": ((*SLOWLY, "postcopy"), "postcopy", '"migrate-start-postcopy"'),
    "pause in the end": ((*SLOWLY, "pause"), "precopy", '"downtime-limit":2000000'),
}


@pytest.fixture(scope="module")
def made() -> Iterator[Machines]:
    """A domain with a disk on shared storage, which each test finds where the last one left it."""
    with machines([qemu("10.0")] * 2) as one:
        secure(one)
        run_domain(one, "lab-a", disk=one.shared / "dom.qcow2")
        yield one


@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_moving(made: Machines, way: str) -> None:
    words, method, told = WAYS[way]
    home = row(made)["host"]
    away = next(host for host in HOSTS if host != home)
    since = log(made, home).stat().st_size

    async def move() -> dict[str, object]:
        async with loaded(made, GUEST):
            return await asyncio.to_thread(made.ok, "migrate", GUEST.name, away, *words)

    moved = asyncio.run(move())
    assert (moved["outcome"], moved["method"], moved["encryption"]) == (
        "completed",
        method,
        "x509",
    )
    assert states(made) == {away: "running"}
    with log(made, home).open("rb") as file:
        file.seek(since)
        assert told.encode() in file.read()


def test_a_disk_on_the_network_stays_where_it_is() -> None:
    """Served by the target to both: neither copied nor removed."""
    with machines([qemu("10.0")] * 2) as made:
        secure(made)
        address = made.lab.host("lab-b").migration_address
        image, tools = made.shared / "net.raw", qemu("10.0").parent
        created = made.inside("lab-b", "qemu-img", "create", "-q", "-f", "raw", str(image), "64M")
        assert created.code == 0, created.stderr
        serve = (str(tools / "qemu-nbd"), "--fork", "--persistent", "--shared=8", "--format=raw")
        where = ("--cache=none", f"--bind={address}", f"--port={NBD_PORT}", "--export-name=dom")
        served = made.inside("lab-b", *serve, *where, str(image))
        assert served.code == 0, served.stderr
        try:
            run_domain(
                made,
                "lab-a",
                disk_xml="<disk type='network' device='disk'><driver name='qemu' type='raw' "
                "cache='none'/><source protocol='nbd' name='dom'>"
                f"<host name='{address}' port='{NBD_PORT}'/></source>"
                "<target dev='vda' bus='virtio'/></disk>",
            )

            async def move() -> list[dict[str, object]]:
                async with loaded(made, GUEST):
                    return [
                        await asyncio.to_thread(made.ok, "migrate", GUEST.name, *words)
                        for words in (("lab-b",), ("lab-a", "--method", "postcopy"))
                    ]

            assert [one["outcome"] for one in asyncio.run(move())] == ["completed"] * 2
            assert states(made) == {"lab-a": "running"}
            assert image.exists()
        finally:
            remove_domain(made)
