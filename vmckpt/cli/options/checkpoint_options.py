"""The options of `vmckpt checkpoint` and `vmckpt fork`."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.retention import RetentionRule

OnlyVm = Annotated[str | None, typer.Argument(help="Only checkpoints of this VM.")]
Point = Annotated[
    str, typer.Argument(help="Checkpoint: its name, or a prefix of its id.", metavar="CHECKPOINT")
]
MaybePoint = Annotated[
    str | None,
    typer.Argument(help="Checkpoint: its name, or a prefix of its id.", metavar="CHECKPOINT"),
]
Members = Annotated[
    str | None,
    typer.Option(
        "--group",
        help="Take a consistent checkpoint of several VMs: VM,VM,...",
        metavar="VM,VM,...",
    ),
]
OfGroup = Annotated[
    str | None,
    typer.Option("--group", help="A group: its name, or a prefix of its id.", metavar="NAME|ID"),
]
MaxHold = Annotated[
    str | None,
    typer.Option(
        "--max-hold",
        help="With --group: how long output may be held. [default: 250ms]",
        metavar="DURATION",
    ),
]
Points = Annotated[
    list[str] | None, typer.Argument(help="Checkpoints: names or ids.", metavar="CHECKPOINT...")
]


class CheckpointKind(StrEnum):
    """How a checkpoint is made and kept."""

    epoch = "epoch"
    internal = "internal"
    file = "file"


KindOption = Annotated[
    CheckpointKind,
    typer.Option(
        "--kind",
        help="epoch: to a store, while the VM runs; file: to a store, as a whole, with the VM "
        "paused; internal: to the qcow2 image, with the VM paused.",
    ),
]
OfVm = Annotated[
    str | None, typer.Option("--vm", help="With --kind internal: the snapshot's VM.", metavar="VM")
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the checkpoint.", metavar="NAME")]
Replace = Annotated[
    bool,
    typer.Option(
        "--replace",
        help="Remove the VM's existing checkpoint of that name once the new one is complete.",
    ),
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", help="Tag, key=value (repeatable).", metavar="KEY=VALUE"),
]
Trigger = Annotated[
    str, typer.Option("--trigger", help="What triggered the checkpoint.", metavar="TEXT")
]

KeepLast = Annotated[
    int, typer.Option("--keep-last", help="Keep this many of the newest.", metavar="N")
]
Hourly = Annotated[
    int,
    typer.Option("--keep-hourly", help="Keep the newest of each of this many hours.", metavar="N"),
]
Daily = Annotated[
    int,
    typer.Option("--keep-daily", help="Keep the newest of each of this many days.", metavar="N"),
]
Weekly = Annotated[
    int,
    typer.Option("--keep-weekly", help="Keep the newest of each of this many weeks.", metavar="N"),
]
MaxAge = Annotated[
    str | None,
    typer.Option(
        "--max-age", help="Remove checkpoints older than this, e.g. 720h.", metavar="DURATION"
    ),
]
MaxSize = Annotated[
    str | None,
    typer.Option(
        "--max-size", help="Remove the oldest until the rest fits, e.g. 20GiB.", metavar="SIZE"
    ),
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


OnlyTag = Annotated[
    str | None,
    typer.Option("--tag", help="Only checkpoints with this key=value.", metavar="KEY=VALUE"),
]
VmId = Annotated[
    str | None,
    typer.Option(
        "--vm-id",
        help="Select one of several VMs of that name by a prefix of its id; none: checkpoints "
        "from before VMs had ids.",
        metavar="ID",
    ),
]
InPlace = Annotated[
    bool, typer.Option("--in-place", help="Return the VM to it; everything since then is lost.")
]
As = Annotated[
    str | None,
    typer.Option("--as", help="Make a copy with this name and its own identity.", metavar="NAME"),
]
Where = Annotated[
    str | None,
    typer.Option("--host", help="Destination host. [default: the VM's own]", metavar="HOST"),
]
DisksOnly = Annotated[
    bool,
    typer.Option(
        "--disks-only",
        help="Restore the disks without memory and devices; the VM is off afterwards.",
    ),
]
Eager = Annotated[bool, typer.Option("--eager", help="Load all memory before the guest runs.")]
Network = Annotated[
    str | None,
    typer.Option(
        "--network",
        help="plugged or isolated. [default: copies are isolated]",
        metavar="plugged|isolated",
    ),
]
KeepMacs = Annotated[
    bool, typer.Option("--keep-macs", help="The copy keeps the original's MAC addresses.")
]

Overcommit = Annotated[
    bool,
    typer.Option(
        "--overcommit",
        help="Fork even if the memory that all forks may write exceeds the host's; guests "
        "die if it runs out.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Open everything that a checkpoint of another site refers to.",
    ),
]

Source = Annotated[
    str, typer.Argument(help="Checkpoint (name or id), or a running VM.", metavar="CHECKPOINT|VM")
]
MOST_FORKS = 1000
Count = Annotated[
    int, typer.Option("--count", help="Number of forks.", min=1, max=MOST_FORKS, metavar="N")
]
ForksName = Annotated[
    str | None,
    typer.Option("--name", help="Name of the forks: NAME-1, NAME-2, ...", metavar="NAME"),
]
Plugged = Annotated[
    bool,
    typer.Option(
        "--network-plugged",
        help="Connect the forks to the host's bridge, all with the same IP address.",
    ),
]
