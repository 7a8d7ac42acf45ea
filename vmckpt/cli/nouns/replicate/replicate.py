"""vmckpt replicate: start, keep, failover, failback, stop. See also status.py."""

from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.nouns.replicate import status as statuses
from vmckpt.cli.options.arguments import VmName, Window
from vmckpt.cli.options.replicate_options import ReplicateArguments, StandbyIsDead
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, note, run, show, warn

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host
    from vmckpt.options.replication import ReplicationOptions
    from vmckpt.replicate.status import ReplicationOutcome

app = typer.Typer(
    help="Continuous replication to a standby host.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
@together
def start(
    name: VmName,
    standby: Annotated[
        str,
        typer.Argument(help="Host that takes over the VM when the primary fails.", metavar="HOST"),
    ],
    *,
    arguments: ReplicateArguments,
    json: Json = False,
) -> None:
    """Protect a running VM.

    Returns when the standby could take over.
    """
    from vmckpt.cli.found import find
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.jobs.files import new_run

    vm, there = run(find(name)), find_host(standby)
    note(f"copying memory and disks of {name} to {standby}")
    outcome = run(vm.replicate(there, arguments.options(vm.host, there), new_run()))
    _show(outcome, f"{name} on {vm.host.name} is protected by {standby}", as_json=json)


@app.command()
@together
def keep(
    name: VmName,
    hosts: Annotated[
        list[str],
        typer.Argument(
            help="Hosts that may run the VM, preferred standbys first.", metavar="HOST..."
        ),
    ],
    window: Window = None,
    *,
    arguments: ReplicateArguments,
    json: Json = False,
) -> None:
    """Keep a VM protected.

    Protects it again whenever protection has ended. For use as a service.
    """
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.jobs.files import new_run
    from vmckpt.replicate.operator.keep import keep as keep_
    from vmckpt.replicate.operator.keeping import DailyWindow

    known = [find_host(host) for host in dict.fromkeys(hosts)]

    def options_of(primary: "Host", standby: "Host") -> "ReplicationOptions":
        return arguments.options(primary, standby)

    def tell(event: str, text: str) -> None:
        show({"vm": name, "event": event, "text": text}, text, as_json=json)

    part = DailyWindow.parse(window) if window else None
    run(keep_(name, known, options_of, new_run=new_run, tell=tell, window=part))


@app.command()
def failover(
    name: VmName,
    primary_is_dead: Annotated[
        bool,
        typer.Option(
            "--primary-is-dead",
            help="State that the arbiter is gone for good, and the primary's host certainly off.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Switch the VM to the standby.

    The primary hands it over; if the primary is dead, the standby takes it over.
    """
    from vmckpt.hosts.inventory.inventory import all_hosts
    from vmckpt.replicate.operator.operate import failover as failover_

    outcome = run(failover_(name, all_hosts(), primary_is_dead=primary_is_dead))
    status = outcome.status
    _show(outcome, f"{name} runs on {status.standby}, unprotected: {status.why}", as_json=json)


@app.command()
@together
def failback(
    name: VmName,
    host: Annotated[
        str | None,
        typer.Argument(help="Destination host. [default: the host that it was taken over from]"),
    ] = None,
    *,
    arguments: ReplicateArguments,
    json: Json = False,
) -> None:
    """Resynchronize a host, then switch the VM over to it."""
    from vmckpt.cli.found import find
    from vmckpt.hosts.inventory.inventory import all_hosts, find_host
    from vmckpt.jobs.files import new_run
    from vmckpt.replicate.operator.failback import came_from, last_options
    from vmckpt.replicate.operator.failback import failback as failback_

    found = run(find(name))
    vm = run(found.home())
    destination = find_host(host or came_from(vm))
    options = arguments.options(vm.host, destination, run(last_options(vm, destination)))
    work = failback_(vm, destination, options, new_run(), all_hosts(), begin=found.replicate)
    outcome = run(work)
    downtime_ms = outcome.guest_downtime_ms
    felt = "" if downtime_ms is None else f"; its heartbeats were silent for {downtime_ms:g} ms"
    text = f"{name} runs on {destination.name}, unprotected{felt}\n  protect it again: "
    _show(outcome, f"{text}vmckpt replicate start {name} {vm.host.name}", as_json=json)


@app.command()
def stop(
    name: VmName,
    standby_is_dead: StandbyIsDead = False,
    json: Json = False,
) -> None:
    """Stop replicating the VM.

    It keeps running where it is, unprotected.
    """
    from vmckpt.hosts.inventory.inventory import all_hosts
    from vmckpt.replicate.operator.stop import stop as stop_

    status = run(stop_(name, all_hosts(), standby_is_dead=standby_is_dead))
    why = status.why if status else "what it wrote is on its shared disks"
    facts = status.to_json() if status else {"vm": name, "why": why}
    show(facts, f"the replication of {name} has ended: {why}", as_json=json)


app.command()(statuses.status)
app.command()(statuses.events)


def _show(outcome: "ReplicationOutcome", text: str, *, as_json: bool) -> None:
    for warning in outcome.warnings:
        warn(f"warning: {warning}")
    show(outcome.to_json(), text, as_json=as_json)
