"""vmckpt migrate."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.commands.moving import move, show_recovery, target_of
from vmckpt.cli.options.arguments import DryRun, TimeLimits, VmName
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, note, run, show, warn
from vmckpt.options.migration import MigrationOptions

if TYPE_CHECKING:
    from vmckpt.forecast.model.choose import Intent
    from vmckpt.hosts.host import Host


@together
def migrate(
    vm: VmName,
    host: Annotated[str | None, typer.Argument(help="Destination host.")] = None,
    *,
    options: MigrationOptions,
    limits: TimeLimits,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Forecast first, as `vmckpt plan`: choose a method that keeps --max-downtime, or "
            "refuse. The other constraints imply it.",
        ),
    ] = False,
    wait_for_calm: Annotated[
        str | None,
        typer.Option(
            help="Wait up to this long until the guest dirties little memory.", metavar="DURATION"
        ),
    ] = None,
    dry_run: DryRun = False,
    recover: Annotated[
        bool, typer.Option("--recover", help="Finish or undo an interrupted migration.")
    ] = False,
    # For the dead-man's switch.
    insist: Annotated[bool, typer.Option("--insist", hidden=True)] = False,
    json: Json = False,
) -> None:
    """Migrate a VM to another host."""
    from vmckpt.errors import UsageError
    from vmckpt.options.sense import of_memory, require_forecast, require_sense

    if recover:
        if dry_run:
            raise UsageError(
                "--recover and --dry-run are both given",
                why="what a recovery does is decided while it asks both hosts",
                remedy=f"see where the VM is: vmckpt vm show {vm}",
            )
        _recover(vm, host, retries=insist, as_json=json)
        return
    began_s, forecast = time.monotonic(), None
    require_sense(options)
    if options.offline and wait_for_calm:
        raise of_memory("--wait-for-calm").error()
    destination = target_of(host)
    wanted = limits.intent(options)
    is_planned = plan or any(limits)
    if is_planned:
        require_forecast(options, promises_downtime=options.allowed_downtime_ms is not None)
    if wait_for_calm and not dry_run:
        run(_calm(vm, destination, options, wanted, began_s=began_s, given=wait_for_calm))
    if is_planned:
        options, forecast = run(_planned(vm, destination, options, wanted, began_s))
    if dry_run:
        from vmckpt.cli.commands.check import show_checks

        show_checks(vm, [destination], options, as_json=json)
    else:
        move(vm, destination, options, forecast, as_json=json)


async def _calm(
    name: str,
    destination: "Host",
    options: MigrationOptions,
    wanted: "Intent",
    *,
    began_s: float,
    given: str,
) -> None:
    from vmckpt.cli.found import find
    from vmckpt.drivers.driver import wait_for_calm_in_time
    from vmckpt.units import parse_duration_s

    vm, for_s = await find(name), parse_duration_s(given)
    await wait_for_calm_in_time(
        vm, destination, options, wanted, began_s=began_s, for_s=for_s, tell=note
    )


async def _planned(
    name: str, destination: "Host", options: MigrationOptions, wanted: "Intent", began_s: float
) -> tuple[MigrationOptions, dict[str, Any]]:
    """The options of the way that keeps the intent, and the forecast for the record."""
    from vmckpt.cli.found import find

    vm = await find(name)
    made = await vm.plan(destination, options, wanted, began_s=began_s)
    for text in made.notes:
        note(f"plan: {text}")
    planned = made.require()
    note(f"plan: {made.choice.reason}")
    return planned, made.record()


def _recover(vm: str, host: str | None, *, retries: bool, as_json: bool) -> None:
    from vmckpt.cli.found import find
    from vmckpt.drivers.find import recover
    from vmckpt.errors import UsageError
    from vmckpt.migrate.outcome.retrying import retry_recovery

    if host:
        raise UsageError(
            "--recover takes no host",
            why="its journal names both ends of the migration",
            remedy=f"vmckpt migrate --recover {vm}",
        )
    recovery = run(retry_recovery(lambda: recover(vm, warn)) if retries else recover(vm, warn))
    if recovery is None:
        where = run(find(vm)).host.name
        text = f"no migration of {vm} was interrupted; it is on {where}"
        show({"vm": vm, "host": where, "outcome": "nothing to recover"}, text, as_json=as_json)
    else:
        show_recovery(recovery, as_json=as_json)
