"""vmckpt drain."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import draining as option
from vmckpt.cli.arguments import Bandwidth
from vmckpt.cli.output import Json, run

if TYPE_CHECKING:
    from vmckpt.fleet.drain.drain import Result


def drain(
    host: Annotated[str, typer.Argument(help="The host that is to be empty.")],
    to: Annotated[
        str | None, typer.Option(help="Only to these hosts.", metavar="HOST,HOST...")
    ] = None,
    finish_within: option.FinishWithin = None,
    max_parallel: option.MaxParallel = None,
    bandwidth: Bandwidth = None,
    apart: Annotated[
        list[str] | None, typer.Option(help="VMs that come to different hosts.", metavar="VM,VM...")
    ] = None,
    together: Annotated[
        list[str] | None, typer.Option(help="VMs that come to one host.", metavar="VM,VM...")
    ] = None,
    keep_free: option.KeepFree = "512M",
    vcpus_per_cpu: option.VcpusPerCpu = 16.0,
    max_vms: option.MaxVms = None,
    one_way: option.OneWay = False,
    for_: option.LookFor = "4s",
    dry_run: option.DryRun = False,
    json: Json = False,
) -> None:
    """Move all VMs that run on a host elsewhere, and have nothing put there until `undrain`.

    Exit code 1 when some stay, each with its reason; 4 when none could move. Killed or cancelled,
    the same command goes on.
    """
    from vmckpt.fleet.drain.drain import drain as drain_
    from vmckpt.hosts.inventory import find_host
    from vmckpt.ui.drain import display

    asked = replace(
        option.asked_for(finish_within, max_parallel, bandwidth, for_),
        to=option.names("--to", to) if to is not None else (),
        apart=tuple(option.names("--apart", text, 2) for text in apart or ()),
        together=tuple(option.names("--together", text, 2) for text in together or ()),
        limits=option.limits_of(keep_free, vcpus_per_cpu, max_vms),
        one_way=one_way,
    )
    there = find_host(host)

    async def work() -> "Result":
        with display(f"draining {host}") as tell:
            return await drain_(there, asked, option.tools(), tell, dry_run=dry_run)

    option.show_result(run(work()), as_json=json)
