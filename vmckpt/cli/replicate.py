"""vmckpt replicate: start, status, failover, stop."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.output import Json, run, show

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host

app = typer.Typer(
    help="A standby that goes on with a VM within milliseconds.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Name = Annotated[str, typer.Argument(help="The VM's name.")]
AUTO = "auto"
SHORTEST_EPOCH_S, LONGEST_EPOCH_S, LONGEST_PAUSE_S = 0.001, 3600.0, 10.0


@app.command()
def start(
    name: Name,
    standby: Annotated[str, typer.Argument(help="The host that is to go on with it.")],
    epoch: Annotated[
        str, typer.Option(help="How long the guest runs between two epochs, or 'auto'.")
    ] = "25ms",
    max_pause: Annotated[
        str, typer.Option("--max-pause", help="What is copied in a pause may take so long.")
    ] = "10ms",
    lease: Annotated[
        str | None,
        typer.Option(
            help="Where it is written who may run the VM: a directory that both hosts share, or "
            "etcd:URL,URL..."
        ),
    ] = None,
    fence: Annotated[
        str | None,
        typer.Option(help="A fencing agent and its arguments, e.g. 'vmckpt-fence-by-kill ssh a'."),
    ] = None,
    unsafe_no_output_commit: Annotated[
        bool,
        typer.Option(
            "--unsafe-no-output-commit",
            help="Let out at once what the guest sends: a failover may take back what was said.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Protect a running VM; returns when the standby could go on with it."""
    from vmckpt.cli.drivers.find import find_own
    from vmckpt.hosts.inventory import find_host
    from vmckpt.replicate.begin import start as start_
    from vmckpt.replicate.request import Options

    epoch_s = None if epoch == AUTO else _duration_s("--epoch", epoch, LONGEST_EPOCH_S)
    vm, there = run(find_own(name)), find_host(standby)
    options = Options(
        arbiter=_arbiter(lease, vm.host, there),
        fence=tuple(shlex.split(fence)) if fence else (),
        epoch_s=epoch_s,
        max_pause_s=_duration_s("--max-pause", max_pause, LONGEST_PAUSE_S),
        holds_output=not unsafe_no_output_commit,
    )
    status = run(start_(vm, there, options, _new_run()))
    show(status, f"{name} on {vm.host.name} is protected by {standby}", as_json=json)


@app.command()
def status(
    name: Name,
    watch: Annotated[bool, typer.Option("--watch", help="Again each second.")] = False,
    json: Json = False,
) -> None:
    """Show how the VM's replication is, as both sides tell it."""
    from time import sleep

    while True:
        sides = run(_facts(name))
        show({"vm": name, "sides": sides}, _lines(sides), as_json=json)
        if not watch:
            return
        sleep(1.0)


@app.command()
def failover(name: Name, json: Json = False) -> None:
    """Have the standby go on with the VM: handed over by the primary, or taken, if it is dead."""
    from vmckpt.hosts.inventory import all_hosts
    from vmckpt.replicate.operate import failover as failover_

    status = run(failover_(name, all_hosts()))
    text = f"{name} runs on {status['standby']}, unprotected: {status['why']}"
    show(status, text, as_json=json)


@app.command()
def stop(name: Name, json: Json = False) -> None:
    """End the VM's replication; it runs on where it is, unprotected."""
    from vmckpt.hosts.inventory import all_hosts
    from vmckpt.replicate.operate import stop as stop_

    status = run(stop_(name, all_hosts()))
    show(status, f"{name} is not replicated any more: {status['why']}", as_json=json)


async def _facts(name: str) -> list[dict[str, Any]]:
    from vmckpt.errors import NotFoundError
    from vmckpt.hosts.inventory import all_hosts
    from vmckpt.replicate.sides import sides

    found = await sides(name, all_hosts())
    if not found:
        raise NotFoundError(
            f"'{name}' is not replicated",
            why="no host has a service for it",
            remedy=f"vmckpt replicate start {name} STANDBY",
        )
    return [side.status | {"host": side.host.name, "answers": side.answers} for side in found]


def _lines(sides: list[dict[str, Any]]) -> str:
    from vmckpt.ui.tables import fields

    return "\n\n".join(
        fields([(key.replace("_", " "), str(value)) for key, value in side.items()])
        for side in sides
    )


def _duration_s(option: str, text: str, most_s: float) -> float:
    from vmckpt.errors import UsageError
    from vmckpt.units import parse_duration_s

    duration_s = parse_duration_s(text)
    if not SHORTEST_EPOCH_S <= duration_s <= most_s:
        raise UsageError(
            f"{option} {text} cannot be kept",
            why=f"it is from 1 ms to {most_s:g} s",
            remedy=f"write e.g. {option} 25ms",
        )
    return duration_s


def _arbiter(given: str | None, primary: "Host", standby: "Host") -> str:
    from vmckpt.errors import RefusedError
    from vmckpt.hosts.inventory import state_dir
    from vmckpt.replicate.arbiter import open_arbiter

    if given is not None:
        open_arbiter(given)
        return given
    if primary.is_this_machine and standby.is_this_machine:
        return str(state_dir() / "leases")
    raise RefusedError(
        "there is no arbiter",
        why="who may run the VM has to be written where both hosts read it",
        remedy="name a directory that both share, or an etcd cluster: --lease etcd:URL,URL...",
    )


def _new_run() -> str:
    import secrets
    import time

    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
