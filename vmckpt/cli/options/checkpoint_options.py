"""The options of `vmckpt checkpoint` and `vmckpt fork`."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.retention import RetentionRule

Vm = Annotated[str, typer.Argument(help="The VM's name.")]
OnlyVm = Annotated[str | None, typer.Argument(help="Only this VM's.")]
Point = Annotated[str, typer.Argument(help="A checkpoint: its name, or the beginning of its id.")]
MaybePoint = Annotated[
    str | None, typer.Argument(help="A checkpoint: its name, or the beginning of its id.")
]
MaybeVm = Annotated[str | None, typer.Argument(help="The VM's name.")]
Members = Annotated[
    str | None,
    typer.Option("--group", help="Several VMs, VM,VM,...: of all of them, as of one moment."),
]
OfGroup = Annotated[
    str | None, typer.Option("--group", help="Of a group: its name, or the beginning of its id.")
]
MaxHold = Annotated[
    str | None,
    typer.Option(
        "--max-hold", help="With --group: how long their output may be held: 250ms unless told."
    ),
]
Points = Annotated[list[str] | None, typer.Argument(help="Checkpoints: names, or ids.")]


class CheckpointKind(StrEnum):
    """How a checkpoint is made and kept."""

    epoch = "epoch"
    savevm = "savevm"
    file = "file"


KindOption = Annotated[
    CheckpointKind,
    typer.Option(
        "--kind",
        help="epoch: into a store, while it runs; file: into a store, saved as a whole, the VM "
        "stopped for it; savevm: into the qcow2 image, the VM stopped for it.",
    ),
]
OfVm = Annotated[str | None, typer.Option("--vm", help="With --kind savevm: whose it is.")]
Name = Annotated[str | None, typer.Option("--name", help="What to call it.")]
Replace = Annotated[
    bool,
    typer.Option(
        "--replace", help="Remove the VM's checkpoint of that name once this one is complete."
    ),
]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="key=value, any number.")]
MaxPause = Annotated[
    str | None,
    typer.Option("--max-pause", help="How long the guest may stand still: 10ms unless told."),
]
Trigger = Annotated[str, typer.Option("--trigger", help="Why it is taken.")]

KeepLast = Annotated[int, typer.Option("--keep-last", help="The newest so many.")]
Hourly = Annotated[int, typer.Option("--hourly", help="The newest of so many hours.")]
Daily = Annotated[int, typer.Option("--daily", help="The newest of so many days.")]
Weekly = Annotated[int, typer.Option("--weekly", help="The newest of so many weeks.")]
MaxAge = Annotated[
    str | None, typer.Option("--max-age", help="None older than this is kept, e.g. 720h.")
]
MaxSize = Annotated[
    str | None, typer.Option("--max-size", help="The oldest go until this is kept, e.g. 20GiB.")
]


class Retention(NamedTuple):
    """Which checkpoints are kept."""

    keep_last: KeepLast = 0
    hourly: Hourly = 0
    daily: Daily = 0
    weekly: Weekly = 0
    max_age: MaxAge = None
    max_size: MaxSize = None

    def rule(self) -> "RetentionRule":
        """As a rule: one that is empty if nothing is said. Raises UsageError."""
        from vmckpt.checkpoint.catalogue.retention import RetentionRule
        from vmckpt.units import parse_duration_s, parse_size_bytes

        return RetentionRule(
            keep_last=self.keep_last,
            hourly=self.hourly,
            daily=self.daily,
            weekly=self.weekly,
            max_age_s=parse_duration_s(self.max_age) if self.max_age else None,
            max_bytes=parse_size_bytes(self.max_size) if self.max_size else None,
        )


OnlyTag = Annotated[str | None, typer.Option("--tag", help="Only checkpoints with this key=value.")]
VmId = Annotated[
    str | None,
    typer.Option(
        "--vm-id",
        help="Which of several VMs of that name: the beginning of its id, or none: checkpoints "
        "taken before VMs had ids.",
    ),
]
Apply = Annotated[bool, typer.Option("--apply", help="Do it; else it is only shown.")]

InPlace = Annotated[
    bool, typer.Option("--in-place", help="The VM goes back to it; what came since is gone.")
]
As = Annotated[
    str | None,
    typer.Option("--as", help="Make a copy of this name, with an identity of its own."),
]
Where = Annotated[str | None, typer.Option("--host", help="Where; else where it was.")]
DisksOnly = Annotated[
    bool,
    typer.Option(
        "--disks-only",
        help="Its disks without memory and devices: the VM is off, and may be of another machine.",
    ),
]
Eager = Annotated[
    bool, typer.Option("--eager", help="Have all of its memory there before it runs.")
]
Network = Annotated[
    str | None,
    typer.Option("--network", help="plugged or isolated; a copy is isolated unless told."),
]
KeepMacs = Annotated[
    bool, typer.Option("--keep-macs", help="A copy starts anew with the original's MACs.")
]

Overcommit = Annotated[
    bool,
    typer.Option(
        "--overcommit", help="Also when all they may write does not fit: guests die if it runs out."
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Of a checkpoint that this site did not take: open for it all that it names.",
    ),
]

Source = Annotated[str, typer.Argument(help="A checkpoint (name or id), or a running VM.")]
MOST_FORKS = 1000
Count = Annotated[int, typer.Option("--count", help="How many.", min=1, max=MOST_FORKS)]
ForksName = Annotated[
    str | None, typer.Option("--name", help="They are called NAME-1, NAME-2, ...")
]
Plugged = Annotated[
    bool,
    typer.Option("--network-plugged", help="Into the host's bridge, all with one address."),
]
