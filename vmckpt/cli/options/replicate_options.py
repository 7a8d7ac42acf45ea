"""What the commands that begin a replication are asked, and what comes of it."""

import shlex
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vmckpt.cli.options.arguments import MaxPause

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host
    from vmckpt.options.replication import ReplicationOptions

AUTO = "auto"

Epoch = Annotated[
    str | None,
    typer.Option(
        "--epoch",
        help="How long the guest runs between two epochs, or 'auto'. [default: 25ms]",
        metavar="DURATION|auto",
    ),
]
Lease = Annotated[
    str | None,
    typer.Option(
        "--lease",
        help="Where leases are kept: a directory that both hosts share, or etcd:URL,URL...",
        metavar="LOCATION",
    ),
]
LeaseTime = Annotated[
    str | None,
    typer.Option(
        "--lease-time",
        help="Lifetime of the primary's lease; a standby without fencing waits this long: 2.5s "
        "to 10s. [default: 3s]",
        metavar="DURATION",
    ),
]
LeaseCredentials = Annotated[
    str | None,
    typer.Option(
        "--lease-credentials",
        help="File on both hosts with credentials for etcd over https; see docs/replicate.md.",
        metavar="FILE",
    ),
]
Fence = Annotated[
    str | None,
    typer.Option(
        "--fence",
        help="Between machines: fencing agent and its arguments, with {host} for the host to "
        "fence, e.g. 'vmckpt-fence-by-kill ssh {host}'.",
        metavar="AGENT",
    ),
]


class DisksChoice(StrEnum):
    """What --disks takes."""

    copy = "copy"
    shared = "shared"


Disks = Annotated[
    DisksChoice | None,
    typer.Option(
        "--disks",
        help="Writable disks: the standby gets copies (default), or both hosts use the same "
        "raw files.",
    ),
]
UnsafeNoOutputCommit = Annotated[
    bool,
    typer.Option(
        "--unsafe-no-output-commit",
        help="Do not hold output: a failover may lose state that the guest has already "
        "communicated.",
    ),
]


# `replicate stop` passes it to the command that it starts on the primary's host.
StandbyIsDead = Annotated[
    bool,
    typer.Option(
        "--standby-is-dead",
        help="State that the standby's host is certainly off; it does not answer.",
    ),
]


class ReplicateArguments(NamedTuple):
    """What was asked on the command line, a field for each option; None: nothing."""

    epoch: Epoch = None
    max_pause: MaxPause = None
    lease: Lease = None
    lease_time: LeaseTime = None
    lease_credentials: LeaseCredentials = None
    fence: Fence = None
    disks: Disks = None
    unsafe_no_output_commit: UnsafeNoOutputCommit = False

    def options(
        self, primary: "Host", standby: "Host", last: "ReplicationOptions | None" = None
    ) -> "ReplicationOptions":
        """For a replication from one to the other; what is not asked for is as it was `last`.

        Raises UsageError, RefusedError: nothing says where leases are.
        """
        from vmckpt.options.replication import ReplicationOptions
        from vmckpt.replicate.arbiter import default_location
        from vmckpt.units import parse_duration_s

        one_machine = primary.is_this_machine and standby.is_this_machine
        location = self.lease or (
            last.arbiter if last else default_location(one_machine=one_machine)
        )
        options = replace(
            last or ReplicationOptions(location),
            arbiter=location,
            holds_output=not self.unsafe_no_output_commit,
        )
        if self.lease_credentials is not None or self.lease is not None:
            options = replace(options, credentials=self.lease_credentials or "")
        if fence := _words(self.fence):
            options = replace(options, fence=fence)
        if self.epoch is not None:
            epoch_s = None if self.epoch == AUTO else parse_duration_s(self.epoch)
            options = replace(options, epoch_s=epoch_s)
        if self.disks is not None:
            options = replace(options, disks=self.disks.value)
        if self.max_pause is not None:
            options = replace(options, max_pause_s=parse_duration_s(self.max_pause))
        if self.lease_time is not None:
            options = replace(options, lease_s=parse_duration_s(self.lease_time))
        return options


def _words(fence: str | None) -> tuple[str, ...]:
    from vmckpt.errors import UsageError

    if fence is None:
        return ()
    try:
        words = tuple(shlex.split(fence))
        why = "it is empty"
    except ValueError as exc:
        words, why = (), str(exc)
    if not words:
        raise UsageError(
            f"--fence {fence!r} is not a command",
            why=why,
            remedy="name a program and its arguments as a shell would take them",
        )
    return words
