"""vmckpt migrate."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli import migrate_options as option
from vmckpt.cli.arguments import (
    Bandwidth,
    FinishBy,
    FinishWithin,
    MaxPause,
    MaxSlowdown,
    NeverRiskPostcopy,
    intent,
)
from vmckpt.cli.migrate_asked import USUAL_DOWNTIME, Asked
from vmckpt.cli.migrate_options import (
    CompressWord,
    DisksWord,
    MethodWord,
    TimeoutWord,
    TlsWord,
)
from vmckpt.cli.output import Json, run, show, warn

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host
    from vmckpt.migrate.options import Options
    from vmckpt.migrate.recover import Recovery
    from vmckpt.migrate.report import Report
    from vmckpt.plan.choose import Intent


def migrate(
    vm: Annotated[str, typer.Argument(help="The VM's name.")],
    host: Annotated[str | None, typer.Argument(help="Where it shall run.")] = None,
    method: option.Method = MethodWord.auto,
    max_downtime: option.MaxDowntime = USUAL_DOWNTIME,
    bandwidth: Bandwidth = None,
    timeout: option.Timeout = None,
    on_timeout: option.OnTimeout = TimeoutWord.abort,
    auto_converge: option.AutoConverge = False,
    auto_converge_initial: option.AutoConvergeInitial = None,
    auto_converge_increment: option.AutoConvergeIncrement = None,
    compress: option.Compress = CompressWord.none,
    compress_level: option.CompressLevel = None,
    xbzrle_cache: option.XbzrleCache = None,
    parallel: option.Parallel = None,
    zerocopy: option.Zerocopy = False,
    postcopy_bandwidth: option.PostcopyBandwidth = None,
    abort_on_error: option.AbortOnError = False,
    never_risk_postcopy: NeverRiskPostcopy = False,
    max_pause: MaxPause = None,
    finish_within: FinishWithin = None,
    finish_by: FinishBy = None,
    max_slowdown: MaxSlowdown = None,
    policy: option.PolicyFile = None,
    observe_only: option.ObserveOnly = False,
    wait_for_calm: option.WaitForCalm = None,
    disks: option.Disks = DisksWord.auto,
    synchronous_writes: option.SynchronousWrites = False,
    tls: option.Tls = TlsWord.auto,
    tls_destination: option.TlsDestination = None,
    offline: option.Offline = False,
    dname: option.Dname = None,
    xml: option.Xml = None,
    persistent_xml: option.PersistentXml = None,
    graphicsuri: option.GraphicsUri = None,
    dry_run: option.DryRun = False,
    recover: option.Recover = False,
    json: Json = False,
) -> None:
    """Move a running VM to another host, or one that is off (--offline)."""
    if recover:
        _recover(vm, host, as_json=json)
        return
    typed = locals()
    asked = Asked(**{name: typed[name] for name in Asked._fields})
    options, target, forecast = asked.options(), _target(host), None
    if wait_for_calm and not dry_run:
        run(_calm(vm, wait_for_calm))
    if max_pause or finish_within or finish_by or max_slowdown:
        asked.require_forecast()
        risk = never_risk_postcopy
        wanted = intent(max_pause, finish_within, finish_by, max_slowdown, never_risk_postcopy=risk)
        options, forecast = run(_planned(vm, target, options, wanted))
    if dry_run:
        from vmckpt.cli import check

        check.dry_run(vm, target, options, as_json=json)
    else:
        show_outcome(run(_migrate(vm, target, options, forecast)), as_json=json)


def _target(name: str | None) -> "Host":
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory import find_host

    if name is None:
        raise UsageError(
            "no target is named", why="a migration needs a host", remedy="vmckpt migrate VM HOST"
        )
    return find_host(name)


def show_outcome(outcome: "Report | Recovery", *, as_json: bool) -> None:
    """Show how a migration ended."""
    from vmckpt.migrate.report import Report

    if isinstance(outcome, Report):
        show(outcome.to_json(), _text(outcome), as_json=as_json)
    else:
        _show_recovery(outcome, as_json=as_json)


async def _calm(name: str, given: str) -> None:
    from vmckpt.cli.drivers.find import find
    from vmckpt.migrate.calm import wait_for_calm
    from vmckpt.units import parse_duration_s

    vm = await find(name)
    await wait_for_calm(vm.name, vm.measure, parse_duration_s(given), warn)


async def _planned(
    name: str, target: "Host", options: "Options", wanted: "Intent"
) -> "tuple[Options, dict[str, Any]]":
    """The options of the way that keeps the intent, and the forecast for the record."""
    from vmckpt.cli import plan

    made = await plan.make(name, target, options, wanted)
    planned = made.require()
    warn(f"plan: {made.choice.reason}")
    return planned, made.record()


async def _migrate(
    name: str, target: "Host", options: "Options", forecast: "dict[str, Any] | None"
) -> "Report | Recovery":
    from vmckpt.cli.drivers.find import find
    from vmckpt.ui.progress import display

    vm = await find(name)
    with display(f"{vm.name}: {vm.host.name} -> {target.name}") as emit:
        return await vm.migrate(target, options, emit, forecast)


def _text(report: "Report") -> str:
    from vmckpt.units import format_duration, format_size

    if report.method == "offline":
        return "\n".join(
            [
                f"{report.vm} is on {report.target}, and off",
                f"  time      {format_duration(report.total_time_s)}",
                f"  encrypted {_encrypted(report)}",
                f"  record    {report.run_record}",
                *(f"  warning   {text}" for text in report.warnings),
            ]
        )

    def milliseconds(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.0f} ms"

    downtime = (
        f"{milliseconds(report.downtime_ms)} by QEMU, {milliseconds(report.guest_downtime_ms)} "
        "as the guest's heartbeats show"
    )
    over = f" over {report.channels} channels" if report.channels > 1 else ""
    lines = [
        f"{report.vm} runs on {report.target}",
        f"  method    {report.method}{over} (asked for: {report.requested_method})",
        f"  time      {format_duration(report.total_time_s)}, of which memory "
        f"{format_duration(report.transfer_time_s)}",
        f"  sent      {format_size(report.transferred_bytes)} in {report.rounds} rounds",
        f"  downtime  {downtime}",
        f"  encrypted {_encrypted(report)}",
        f"  record    {report.run_record}",
    ]
    return "\n".join([*lines, *(f"  warning   {text}" for text in report.warnings)])


def _encrypted(report: "Report") -> str:
    return "no" if report.encryption == "off" else f"yes ({report.encryption})"


def _recover(vm: str, host: str | None, *, as_json: bool) -> None:
    from vmckpt.cli.drivers.find import find, recover
    from vmckpt.errors import UsageError

    if host:
        raise UsageError(
            "--recover takes no host",
            why="both ends of the migration stand in its journal",
            remedy=f"vmckpt migrate --recover {vm}",
        )
    recovery = run(recover(vm))
    if recovery is None:
        where = run(find(vm)).host.name
        text = f"no migration of {vm} was cut off; it is on {where}"
        show({"vm": vm, "host": where, "outcome": "nothing to recover"}, text, as_json=as_json)
    else:
        _show_recovery(recovery, as_json=as_json)


def _show_recovery(recovery: "Recovery", *, as_json: bool) -> None:
    from dataclasses import asdict

    words = f"{recovery.vm} is on {recovery.host}: migration {recovery.run} {recovery.outcome}"
    show(asdict(recovery), words, as_json=as_json)
