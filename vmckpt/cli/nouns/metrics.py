"""vmckpt metrics."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.loop import run, run_until_interrupted
from vmckpt.cli.output import note

if TYPE_CHECKING:
    from prometheus_client import Metric

app = typer.Typer(
    help="Metrics for Prometheus.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
LISTEN = "127.0.0.1:9177"


@app.callback()
def metrics(
    context: typer.Context,
    textfile: Annotated[
        Path | None,
        typer.Option(
            help="Into this file, in one step, for node_exporter's textfile collector.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Print all metrics once, as Prometheus reads them."""
    if context.invoked_subcommand is not None:
        return
    from vmckpt.metrics.families import render

    text = render(run(collect()))
    if textfile is None:
        print(text, end="")
    else:
        write(textfile, text)


@app.command()
def serve(
    listen: Annotated[
        str,
        typer.Option(help="ADDR:PORT; with port 0 the kernel chooses one.", metavar="ADDRESS:PORT"),
    ] = LISTEN,
) -> None:
    """Serve metrics over HTTP at /metrics.

    Until Ctrl-C, collected for each request.
    """
    run_until_interrupted(_serve(*_address(listen)))


async def _serve(address: str, port: int) -> None:
    import asyncio

    from vmckpt.errors import RefusedError
    from vmckpt.hosts.sockets.uri import in_uri
    from vmckpt.metrics.serve import serving

    try:
        async with serving(address, port, collect) as got:
            note(f"serving http://{in_uri(address)}:{got}/metrics")
            await asyncio.Event().wait()
    except (OSError, UnicodeError) as exc:  # the latter: of a name that no host can have
        raise RefusedError(
            f"cannot listen on {address}:{port}",
            why=(isinstance(exc, OSError) and exc.strerror) or str(exc),
            remedy="choose another address or port with --listen",
        ) from exc


def _address(listen: str) -> tuple[str, int]:
    from vmckpt.errors import UsageError
    from vmckpt.units import whole_number

    address, _, text = listen.rpartition(":")
    port = whole_number(text, 65535)
    if not address or port is None:
        raise UsageError(
            f"'{listen}' is not an address to listen on",
            why="it must be ADDR:PORT",
            remedy=f"write e.g. --listen {LISTEN}",
        )
    return address.strip("[]"), port


def write(path: Path, text: str) -> None:
    """Replace a file in one step, world-readable, since the exporter may run as another user."""
    from vmckpt.state.durable import replace

    replace(path, text, mode=0o644)


async def collect() -> "list[Metric]":
    """All metrics of now. Hosts that do not answer are `vmckpt_host_up 0`, and tell no more."""
    from vmckpt.events.record import load_all
    from vmckpt.fleet.schedule.status import all_now
    from vmckpt.hosts.inventory.directories import runs_dir
    from vmckpt.metrics.migrations import migrations
    from vmckpt.metrics.schedules import schedules

    moves, scheduled = migrations(load_all(runs_dir())), schedules(all_now().statuses)
    return [*await _of_hosts(), *moves, *scheduled]


async def _of_hosts() -> "list[Metric]":
    from vmckpt.fleet.overview import overview
    from vmckpt.forecast.measure.last_measured import all_kept
    from vmckpt.metrics.replications import replications
    from vmckpt.metrics.vms import Measured, dirty_rates, hosts, vms

    seen = await overview()
    known = {vm.name for vm in seen.vms}
    measured = [Measured(*kept) for kept in all_kept() if kept[0] in known]
    return [
        *hosts({host.name: host.free_bytes is not None for host in seen.hosts}),
        *vms(vm.to_json() for vm in seen.vms),
        *dirty_rates(measured),
        *replications(seen.replications),
    ]
