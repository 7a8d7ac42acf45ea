"""vmckpt undrain."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import draining as option
from vmckpt.cli.arguments import Bandwidth
from vmckpt.cli.output import Json, run

if TYPE_CHECKING:
    from vmckpt.fleet.drain.drain import Result


def undrain(
    host: Annotated[str, typer.Argument(help="The host that was drained.")],
    finish_within: option.FinishWithin = None,
    max_parallel: option.MaxParallel = None,
    bandwidth: Bandwidth = None,
    keep_free: option.KeepFree = "512M",
    vcpus_per_cpu: option.VcpusPerCpu = 16.0,
    max_vms: option.MaxVms = None,
    one_way: option.OneWay = False,
    for_: option.LookFor = "4s",
    dry_run: option.DryRun = False,
    json: Json = False,
) -> None:
    """Let a drained host have VMs again, and bring back those that were drained from it.

    Exit codes and interruptions are as with `drain`.
    """
    from vmckpt.fleet.drain.drain import undrain as undrain_
    from vmckpt.hosts.inventory import find_host
    from vmckpt.ui.drain import display

    asked = replace(
        option.asked_for(finish_within, max_parallel, bandwidth, for_),
        limits=option.limits_of(keep_free, vcpus_per_cpu, max_vms),
        one_way=one_way,
    )
    there = find_host(host)

    async def work() -> "Result":
        with display(f"bringing VMs back to {host}") as tell:
            return await undrain_(there, asked, option.tools(), tell, dry_run=dry_run)

    option.show_result(run(work()), as_json=json)
