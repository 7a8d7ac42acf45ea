"""vmckpt host: list, add, remove, check, doctor."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.output import Json, run, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vmckpt.hosts.entries import SshEntry
    from vmckpt.hosts.host import Entry, Host
    from vmckpt.hosts.local import LocalHost
    from vmckpt.migrate.calibrate import Calibration
    from vmckpt.migrate.host_checks import HostReport
    from vmckpt.plan.link import Link

app = typer.Typer(help="Machines that VMs live on.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_(json: Json = False) -> None:
    """List the hosts; none is asked."""
    from vmckpt.hosts.inventory import all_entries
    from vmckpt.ui.tables import table

    hosts = [_facts(entry) | {"address": _address(entry)} for entry in all_entries()]
    columns = ("name", "address", "migration_address", "qemu", "state_dir")
    rows = [tuple(host[column] or "" for column in columns) for host in hosts]
    header = ("name", "address", "migration address", "qemu", "state directory")
    show({"hosts": hosts}, table(header, rows), as_json=json)


def _address(entry: "LocalHost | SshEntry") -> str | None:
    """Where SSH finds it; None for this machine and parts of it."""
    from vmckpt.hosts.local import LocalHost

    return None if isinstance(entry, LocalHost) else str(entry.address)


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="What it shall be called.")],
    address: Annotated[
        str, typer.Argument(help="ssh://USER@HOST:PORT; a Host of ~/.ssh/config will do.")
    ],
    migration_addr: Annotated[
        str | None, typer.Option(help="Where migrations come in. [default: where SSH does]")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where it keeps its state. [default: as vmckpt there does]")
    ] = None,
    qemu: Annotated[str, typer.Option(help="The QEMU to start there.")] = "qemu-system-x86_64",
    bridge: Annotated[str | None, typer.Option(help="Where its guests' NICs go.")] = None,
    migration_ports: Annotated[
        str | None, typer.Option(help="Ports that migrations may come in on.", metavar="A-B")
    ] = None,
    libvirt: Annotated[
        Path | None,
        typer.Option(help="The socket of its libvirtd, e.g. /run/libvirt/libvirt-sock."),
    ] = None,
    vmckpt: Annotated[str, typer.Option(help="The command vmckpt there.")] = "vmckpt",
    ssh_config: Annotated[
        Path | None, typer.Option(help="An SSH configuration instead of ~/.ssh/config.")
    ] = None,
    json: Json = False,
) -> None:
    """Add a host that is reached over SSH. It has to answer now: what is wrong is told at once."""
    from vmckpt.hosts.entries import SshEntry
    from vmckpt.hosts.inventory import add_host, greet, require_new_name
    from vmckpt.hosts.ssh.address import Address

    require_new_name(name)
    where = Address.parse(address, ssh_config.absolute() if ssh_config else None)
    greeting = run(greet(name, where, vmckpt, state_dir))
    entry = SshEntry(
        name,
        greeting.state_dir,
        migration_addr or greeting.address or where.host,
        qemu=qemu,
        bridge=bridge,
        migration_ports=_ports(migration_ports),
        libvirt=libvirt,
        address=where,
        vmckpt=vmckpt,
    )
    add_host(entry)
    text = f"{name} is added; see what it lacks: vmckpt host check {name}"
    show(_facts(entry), text, as_json=json)


def _ports(text: str | None) -> tuple[int, int] | None:
    from vmckpt.errors import UsageError

    if text is None:
        return None
    first, _, last = text.partition("-")
    if first.isdigit() and last.isdigit() and 0 < int(first) <= int(last) < 65536:
        return int(first), int(last)
    raise UsageError(
        f"'{text}' is no range of ports", why="it has to be FIRST-LAST", remedy="e.g. 49152-49215"
    )


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="The host's name.")], json: Json = False
) -> None:
    """Forget a host; its VMs and all else on it stay as they are."""
    from vmckpt.hosts.inventory import remove_host

    remove_host(name)
    show({"name": name, "removed": True}, f"{name} is forgotten", as_json=json)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="The host's name.")] = "local", json: Json = False
) -> None:
    """Ask a host what it can do, and what it lacks; exit code 4 when it can run no VMs."""
    from vmckpt.hosts.inventory import find_host, local_host
    from vmckpt.migrate.host_checks import check_host
    from vmckpt.ui.tables import fields

    host = find_host(name)
    report = run(check_host(host, local_host()))
    facts = _facts(host) | report.facts
    pairs = [(key.replace("_", " "), str(value)) for key, value in facts.items()]
    text = f"{fields(pairs)}\n\n{_table(report)}"
    show(facts | _checks(report), text, as_json=json)
    if not report.fit:
        raise typer.Exit(4)


@app.command()
def calibrate(
    first: Annotated[str, typer.Argument(help="The one host.", metavar="A")],
    second: Annotated[str, typer.Argument(help="The other.", metavar="B")],
    size: Annotated[str, typer.Option(help="Memory of the guest that is moved.")] = "256M",
    json: Json = False,
) -> None:
    """Learn what moving between two hosts costs: a small guest of its own moves there and back."""
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory import find_host
    from vmckpt.migrate.calibrate import LEAST_BYTES, calibrate
    from vmckpt.ui.progress import display
    from vmckpt.units import format_size, parse_size_bytes

    memory_bytes = parse_size_bytes(size)
    if memory_bytes < LEAST_BYTES or memory_bytes % (1 << 20):
        raise UsageError(
            f"--size {size} does not do",
            why=f"it has to be whole MiB, at least {format_size(LEAST_BYTES)}",
            remedy="write e.g. --size 256M",
        )

    async def work() -> "Calibration":
        with display(f"calibrating {first} and {second}") as emit:
            return await calibrate(find_host(first), find_host(second), memory_bytes, emit)

    done = run(work())
    ways = [(first, second, done.there), (second, first, done.back)]
    facts = [
        {"source": source, "target": target, "sending": kind, **asdict(link)}
        for source, target, links in ways
        for kind, link in links.items()
    ]
    result = {"moves": done.moves, "skipped": list(done.skipped), "links": facts}
    show(result, _links(ways, done.skipped), as_json=json)


def _links(ways: "list[tuple[str, str, dict[str, Link]]]", skipped: "tuple[str, ...]") -> str:
    from vmckpt.ui.tables import table
    from vmckpt.units import format_duration, format_rate

    rows = [
        (
            f"{source} -> {target}",
            kind,
            format_rate(link.bytes_per_s),
            format_duration(link.costs.zero_page_s),
            format_duration(link.fixed_s),
            format_duration(link.switch_s),
            f"{link.spread:.0%}",
            str(link.moves),
        )
        for source, target, links in ways
        for kind, link in links.items()
    ]
    header = ("hosts", "sent", "pages", "a zero page", "fixed", "switch", "spread", "moves")
    return "\n".join([table(header, rows), *(f"left out: {reason}" for reason in skipped)])


@app.command()
def doctor(
    names: Annotated[
        list[str] | None, typer.Argument(help="The hosts; all without.", metavar="HOST...")
    ] = None,
    json: Json = False,
) -> None:
    """Say what is wrong on each host and what mends it; exit code 4 when one can run no VMs."""
    from vmckpt.hosts.inventory import all_hosts, find_host

    hosts = [find_host(name) for name in dict.fromkeys(names)] if names else all_hosts()
    reports = run(_examine(hosts))
    parts = [
        f"{host.name}: {_verdict(report)}" for host, report in zip(hosts, reports, strict=True)
    ]
    answer = [
        {"name": host.name} | _checks(report) for host, report in zip(hosts, reports, strict=True)
    ]
    show({"hosts": answer}, "\n\n".join(parts), as_json=json)
    if not all(report.fit for report in reports):
        raise typer.Exit(4)


async def _examine(hosts: "Sequence[Host]") -> "list[HostReport]":
    import asyncio

    from vmckpt.errors import HostDownError
    from vmckpt.hosts.inventory import local_host
    from vmckpt.migrate.host_checks import HostReport, check_host
    from vmckpt.vm.check import REFUSE, Check

    async def examine(host: "Host") -> HostReport:
        try:
            return await check_host(host, local_host())
        except HostDownError as exc:
            silent = Check("reachable", REFUSE, f"{exc.what}: {exc.why}", exc.remedy)
            return HostReport({}, (silent,))

    return await asyncio.gather(*(examine(host) for host in hosts))


def _verdict(report: "HostReport") -> str:
    from vmckpt.vm.check import OK

    lacking = [check for check in report.checks if check.verdict != OK]
    if not lacking:
        return "nothing is wrong"
    return "\n".join(
        f"\n  {check.verdict}  {check.code}: {check.reason}\n        do: {check.remedy}"
        for check in lacking
    ).lstrip()


def _checks(report: "HostReport") -> dict[str, Any]:
    return {"fit": report.fit, "checks": [check._asdict() for check in report.checks]}


def _table(report: "HostReport") -> str:
    from vmckpt.ui.tables import table

    rows = [(check.verdict, check.code, check.reason, check.remedy) for check in report.checks]
    return table(("verdict", "check", "reason", "remedy"), rows)


def _facts(host: "Host | Entry") -> dict[str, Any]:
    return {
        "name": host.name,
        "migration_address": host.migration_address,
        "migration_ports": host.migration_ports,
        "qemu": host.qemu,
        "bridge": host.bridge,
        "state_dir": str(host.state_dir),
    }
