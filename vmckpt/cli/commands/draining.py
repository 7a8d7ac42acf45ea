"""What `drain` and `undrain` share: their options, and how they end."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vmckpt.cli.options.arguments import DryRun, FinishWithin, MeasureFor, intent, measure_s
from vmckpt.cli.options.together import Only
from vmckpt.cli.output import Json, run, show
from vmckpt.options.migration import MigrationOptions
from vmckpt.ui.shown import one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from vmckpt.fleet.drain.events import Show
    from vmckpt.fleet.drain.plan import DrainOptions
    from vmckpt.fleet.drain.result import DrainResult

MaxParallel = Annotated[
    int | None,
    typer.Option(
        "--max-parallel",
        min=1,
        help="Maximum number of concurrent migrations per host. [default: whatever finishes "
        "first, up to 8]",
        metavar="N",
    ),
]
KeepFree = Annotated[
    str,
    typer.Option("--keep-free", help="Memory to keep free on each destination.", metavar="SIZE"),
]
MOST_VCPUS_PER_CPU = 1e6
VcpusPerCpu = Annotated[
    float,
    typer.Option(
        "--vcpus-per-cpu",
        min=0.1,
        max=MOST_VCPUS_PER_CPU,
        help="Maximum number of vCPUs per processor.",
        metavar="N",
    ),
]
MaxVms = Annotated[
    int | None,
    typer.Option("--max-vms", min=1, help="Maximum number of VMs per destination.", metavar="N"),
]
OneWay = Annotated[
    bool, typer.Option("--one-way", help="Allow destinations from which a VM could not return.")
]

Reason = Annotated[
    str,
    typer.Option(
        "--reason",
        help="With `drain`: a word to record. With `undrain`: do nothing if the host was drained "
        "without it.",
        metavar="WORD",
    ),
]


# From a migration's options.
Link = Annotated[MigrationOptions, Only(("bandwidth_bytes_per_s",))]


class Common(NamedTuple):
    """The options that both have."""

    finish_within: FinishWithin = None
    max_parallel: MaxParallel = None
    keep_free: KeepFree = "512M"
    vcpus_per_cpu: VcpusPerCpu = 16.0
    max_vms: MaxVms = None
    one_way: OneWay = False
    for_: MeasureFor = "4s"
    reason: Reason = ""
    dry_run: DryRun = False
    json: Json = False

    def drain_options(self, options: MigrationOptions) -> "DrainOptions":
        """What they mean. Raises UsageError."""
        import math

        from vmckpt.errors import UsageError
        from vmckpt.fleet.drain.plan import DrainOptions
        from vmckpt.fleet.drain.view import HostLimits
        from vmckpt.units import parse_size_bytes

        if math.isnan(self.vcpus_per_cpu):  # it is neither below the least nor above the most
            raise UsageError(
                "--vcpus-per-cpu nan is not a number",
                why=f"it is from 0.1 to {MOST_VCPUS_PER_CPU:g}",
                remedy="write e.g. --vcpus-per-cpu 16",
            )
        limits = intent(None, self.finish_within, None, None, never_risk_postcopy=False)
        return DrainOptions(
            finish_within_s=limits.finish_within_s,
            max_parallel=self.max_parallel,
            bandwidth_bytes_per_s=options.bandwidth_bytes_per_s,
            limits=HostLimits(parse_size_bytes(self.keep_free), self.vcpus_per_cpu, self.max_vms),
            one_way=self.one_way,
            measure_s=measure_s(self.for_),
        )


def names(option: str, text: str, least: int = 1) -> tuple[str, ...]:
    """Names with commas between them. Raises UsageError."""
    from vmckpt.errors import UsageError

    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if len(found) < least:
        raise UsageError(
            f"{option} {text} names too few VMs",
            why=f"it takes {least} or more, separated by commas",
            remedy=f"e.g. {option} {'a' if least == 1 else 'a,b'}",
        )
    return found


def carried_out(
    work: "Callable[[Show], Awaitable[DrainResult]]", title: str, *, as_json: bool
) -> None:
    """Run it, showing progress; print the outcome, and exit with its code."""
    from vmckpt.cli.found import keep_sessions
    from vmckpt.ui.drain import display

    keep_sessions()

    async def shown() -> "DrainResult":
        with display(title) as tell:
            return await work(tell)

    result = run(shown())
    show(result.to_json(), "\n".join(_text(result)), as_json=as_json)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _text(result: "DrainResult") -> "Iterable[str]":
    from vmckpt.fleet.drain.drain import DRAIN
    from vmckpt.ui.drain import planned
    from vmckpt.units import counted, format_duration

    plan = result.plan
    if result.took_s is None:
        yield planned(plan)
    else:
        verb = "moved off" if result.action == DRAIN else "moved back to"
        text = f"{counted(len(result.moved), 'VM')} {verb} {result.host}"
        text += f" in {format_duration(result.took_s)}"
        if plan.band_s is not None and plan.table.moves:
            text += f" (forecast: {format_duration(plan.band_s[1])})"
        yield text
    for one in result.stay:
        yield f"  {one.vm} stays: {one_line(one.why)}\n    do: {one_line(one.remedy)}"
    for held in result.held:
        yield f"  {held.vm}: {one_line(held.why)}\n    do: {one_line(held.remedy)}"
    if plan.stopped:
        yield f"  not running, and left where they are: {', '.join(plan.stopped)}"
    if result.took_s is not None and result.action == DRAIN:
        closed = f"  {result.host} gets no VMs until: vmckpt undrain {result.host}"
        yield closed if result.closed else f"  nothing was changed: {result.host} stays open"
