"""vmckpt migrate."""

import time
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
from vmckpt.cli.moving import move, show_recovery, target_of
from vmckpt.cli.output import Json, run, show, warn

if TYPE_CHECKING:
    from vmckpt.forecast.model.choose import Intent
    from vmckpt.hosts.host import Host
    from vmckpt.options.migration import Options


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
    insist: option.Insist = False,
    json: Json = False,
) -> None:
    """Move a running VM to another host, or one that is off (--offline)."""
    if recover:
        _recover(vm, host, insists=insist, as_json=json)
        return
    typed, began_s = locals(), time.monotonic()
    asked = Asked(**{name: typed[name] for name in Asked._fields})
    options, target, forecast = asked.options(), target_of(host), None
    wishes = (max_pause, finish_within, finish_by, max_slowdown)
    wanted = intent(*wishes, never_risk_postcopy=never_risk_postcopy)
    if any(wishes):
        asked.require_forecast(promises_pause=max_pause is not None)
    if wait_for_calm and not dry_run:
        run(_calm(vm, target, options, wanted, began_s=began_s, given=wait_for_calm))
    if any(wishes):
        options, forecast = run(_planned(vm, target, options, wanted, began_s))
    if dry_run:
        from vmckpt.cli import check

        check.dry_run(vm, target, options, as_json=json)
    else:
        move(vm, target, options, forecast, as_json=json)


async def _calm(
    name: str, target: "Host", options: "Options", wanted: "Intent", *, began_s: float, given: str
) -> None:
    """Wait for a calm moment, but no longer than leaves the time that the migration takes."""
    from vmckpt.cli.found import find
    from vmckpt.forecast.calm import wait_for_calm
    from vmckpt.units import parse_duration_s

    for_s, vm = parse_duration_s(given), await find(name)
    if wanted.finish_within_s is not None:
        for_s = min(for_s, (await vm.plan(target, options, wanted, began_s=began_s)).spare_s)
    await wait_for_calm(vm.name, vm.measure, for_s, warn)


async def _planned(
    name: str, target: "Host", options: "Options", wanted: "Intent", began_s: float
) -> "tuple[Options, dict[str, Any]]":
    """The options of the way that keeps the intent, and the forecast for the record."""
    from vmckpt.cli.found import find

    vm = await find(name)
    made = await vm.plan(target, options, wanted, began_s=began_s)
    for note in made.notes:
        warn(f"plan: {note}")
    planned = made.require()
    warn(f"plan: {made.choice.reason}")
    return planned, made.record()


def _recover(vm: str, host: str | None, *, insists: bool, as_json: bool) -> None:
    from vmckpt.cli.found import find
    from vmckpt.drivers.find import recover
    from vmckpt.errors import UsageError
    from vmckpt.migrate.insist import insist

    if host:
        raise UsageError(
            "--recover takes no host",
            why="both ends of the migration stand in its journal",
            remedy=f"vmckpt migrate --recover {vm}",
        )
    recovery = run(insist(lambda: recover(vm, warn)) if insists else recover(vm, warn))
    if recovery is None:
        where = run(find(vm)).host.name
        text = f"no migration of {vm} was cut off; it is on {where}"
        show({"vm": vm, "host": where, "outcome": "nothing to recover"}, text, as_json=as_json)
    else:
        show_recovery(recovery, as_json=as_json)
