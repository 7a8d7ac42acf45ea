"""The work of `vmckpt migrate`, independent of the parser, and the display of its result.

It does not import typer: a plain `vmckpt migrate VM HOST` does without (`cli/entry.py`).
"""

from typing import TYPE_CHECKING, Any

from vmckpt.cli.loop import run
from vmckpt.cli.results import show
from vmckpt.codec import builtins

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host
    from vmckpt.migrate.outcome.recover import Recovery
    from vmckpt.migrate.report import MigrationReport
    from vmckpt.options.migration import MigrationOptions


def move_plainly(vm: str, host: str, *, as_json: bool) -> None:
    """Move a running VM with every option as it is when it is not given."""
    from vmckpt.options.migration import MigrationOptions

    move(vm, target_of(host), MigrationOptions(), None, as_json=as_json)


def move(
    vm: str,
    destination: "Host",
    options: "MigrationOptions",
    forecast: "dict[str, Any] | None",
    *,
    as_json: bool,
) -> None:
    """Migrate a VM; show its progress and its outcome."""
    show_outcome(run(_migrate(vm, destination, options, forecast)), as_json=as_json)


def target_of(name: str | None) -> "Host":
    """The host that is named. Raises UsageError, NotFoundError."""
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory.inventory import find_host

    if name is None:
        raise UsageError(
            "no destination is named",
            why="a migration needs a host",
            remedy="vmckpt migrate VM HOST",
        )
    return find_host(name)


def show_outcome(outcome: "MigrationReport | Recovery", *, as_json: bool) -> None:
    """Show how a migration ended."""
    from vmckpt.migrate.report import MigrationReport

    if isinstance(outcome, MigrationReport):
        show(builtins(outcome), _text(outcome), as_json=as_json)
    else:
        show_recovery(outcome, as_json=as_json)


async def _migrate(
    name: str, destination: "Host", options: "MigrationOptions", forecast: "dict[str, Any] | None"
) -> "MigrationReport | Recovery":
    from vmckpt.cli.found import find
    from vmckpt.ui.progress import display

    vm = await find(name)
    with display(f"{vm.name}: {vm.host.name} -> {destination.name}") as emit:
        return await vm.migrate(destination, options, emit, forecast)


_HEARD_BY = {
    "heartbeats": "as the guest's heartbeats show",
    "arp": "as ARP probes every 5 ms show",
}


def _text(report: "MigrationReport") -> str:
    from vmckpt.ui.tables import fields
    from vmckpt.units import counted, format_duration, format_size

    rest = [
        ("encrypted", _encrypted(report)),
        ("record", report.run_record),
        *(("warning", text) for text in report.warnings),
    ]
    if report.method == "offline":
        pairs = [("time", format_duration(report.total_time_s)), *rest]
        return f"{report.vm} is on {report.target}, and off\n{fields(pairs, indent='  ')}"

    measured = (
        (report.downtime_ms, "by QEMU"),
        (report.guest_downtime_ms, _HEARD_BY.get(report.guest_downtime_by or "", "from outside")),
    )
    shown = [f"{value:.0f} ms {source}" for value, source in measured if value is not None]
    downtime = ", ".join(shown) or "not measured"
    over = f" over {report.channels} channels" if report.channels > 1 else ""
    total, memory = map(format_duration, (report.total_time_s, report.transfer_time_s))
    rounds = counted(report.rounds, "round")
    pairs = [
        ("method", f"{report.method}{over} (requested: {report.requested_method})"),
        ("time", f"{total}, of which memory {memory}"),
        ("sent", f"{format_size(report.transferred_bytes)} in {rounds}"),
        ("downtime", downtime),
        *rest,
    ]
    return f"{report.vm} runs on {report.target}\n{fields(pairs, indent='  ')}"


def _encrypted(report: "MigrationReport") -> str:
    return "no" if report.encryption == "off" else f"yes ({report.encryption})"


def show_recovery(recovery: "Recovery", *, as_json: bool) -> None:
    """Show where a VM is whose migration was interrupted."""
    from dataclasses import asdict

    words = f"{recovery.vm} is on {recovery.host}: migration {recovery.run} {recovery.outcome}"
    show(asdict(recovery), words, as_json=as_json)
