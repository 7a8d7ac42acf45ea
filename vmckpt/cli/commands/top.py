"""vmckpt top: hosts, VMs, operations, protection and checkpoints, as they are now."""

from typing import Annotated, Any

import typer

from vmckpt.cli.loop import run_until_interrupted
from vmckpt.cli.output import Json, show

# Polling more often would cost the hosts too much.
LEAST_EVERY_S = 0.1
# Stores are read only every so many refreshes: they may be large, and far away.
STORES_EVERY = 10


def top(
    every: Annotated[str, typer.Option(help="Refresh interval.", metavar="DURATION")] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Show it once.")] = False,
    json: Json = False,
) -> None:
    """Show hosts, VMs and operations, refreshed until Ctrl-C.

    Also shows protection and checkpoints. Dirty rates are the last ones measured; checkpoints in an
    encrypted store are listed if its key is in the environment or ssh-agent.
    """
    from vmckpt.cli.output import run
    from vmckpt.errors import UsageError
    from vmckpt.fleet.overview import facts
    from vmckpt.units import parse_duration_s

    every_s = parse_duration_s(every)
    if every_s < LEAST_EVERY_S:
        raise UsageError(
            f"--every {every} is too often",
            why=f"each refresh queries all hosts: {LEAST_EVERY_S:g} s is the least",
            remedy="write e.g. --every 2s",
        )
    if once:
        _show(run(facts()), as_json=json)
    else:
        run_until_interrupted(_watch(every_s, as_json=json))


async def _watch(every_s: float, *, as_json: bool) -> None:
    import asyncio
    import sys

    from vmckpt.fleet import overview

    checkpoints: dict[str, Any] = {}
    number = 0

    async def query() -> dict[str, Any]:
        nonlocal checkpoints, number
        facts = await overview.facts(checkpoints if number % STORES_EVERY else None)
        checkpoints = {vm["name"]: vm["checkpoints"] for vm in facts["vms"]}
        number += 1
        return facts

    if as_json or not sys.stdout.isatty():
        while True:
            _show(await query(), as_json=as_json)
            await asyncio.sleep(every_s)
    from vmckpt.ui.top_live import screen

    with screen() as draw:
        while True:
            draw(await query())
            await asyncio.sleep(every_s)


def _show(facts: dict[str, Any], *, as_json: bool) -> None:
    from vmckpt.ui.top import frame

    show(facts, frame(facts), as_json=as_json)
