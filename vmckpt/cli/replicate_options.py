"""What the commands that begin a replication are asked, and what comes of it."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host
    from vmckpt.replicate.request import Options

AUTO = "auto"
SHORTEST_EPOCH_S, LONGEST_EPOCH_S, LONGEST_PAUSE_S = 0.001, 3600.0, 10.0
# Nobody waits longer for each answer: with longer epochs output is let out, and by name only.
LONGEST_HELD_S = 1.0
# A shorter lease would end, and pause the guest, when one question to the arbiter gets no answer; a
# standby that has taken the term is waited for no longer than a longer one might take
# (`keeper.GIVEN_UP_S`). Tests hold both to the constants that they follow from.
SHORTEST_LEASE_S, LONGEST_LEASE_S = 2.5, 10.0

Epoch = Annotated[
    str | None,
    typer.Option(help="How long the guest runs between two epochs, or 'auto'. 25ms by default."),
]
MaxPause = Annotated[
    str | None,
    typer.Option("--max-pause", help="What is copied in a pause may take so long. 10ms by default"),
]
Lease = Annotated[
    str | None,
    typer.Option(
        help="Where it is written who may run the VM: a directory that both hosts share, or "
        "etcd:URL,URL..."
    ),
]
LeaseTime = Annotated[
    str | None,
    typer.Option(
        "--lease-time",
        help="How long the primary's lease lasts unrenewed, and so how long a standby waits that "
        "cannot fence it: 2.5s to 10s, 3s by default.",
    ),
]
LeaseCredentials = Annotated[
    str | None,
    typer.Option(
        "--lease-credentials",
        help="A file on both hosts with what etcd over https wants to know them by; see "
        "docs/replicate.md.",
    ),
]
Fence = Annotated[
    str | None,
    typer.Option(
        help="Between machines: a fencing agent and its arguments, {host} being the one to fence, "
        "e.g. 'vmckpt-fence-by-kill ssh {host}'."
    ),
]


class DisksWish(StrEnum):
    """What --disks takes."""

    copy = "copy"
    shared = "shared"


Disks = Annotated[
    DisksWish | None,
    typer.Option(
        help="Of disks that can be written: the standby gets copies (default), or both hosts see "
        "the same raw files."
    ),
]
UnsafeNoOutputCommit = Annotated[
    bool,
    typer.Option(
        "--unsafe-no-output-commit",
        help="Let out at once what the guest sends: a failover may take back what was said.",
    ),
]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked on the command line, a field for each option; None: nothing."""

    epoch: Epoch = None
    max_pause: MaxPause = None
    lease: Lease = None
    lease_time: LeaseTime = None
    lease_credentials: LeaseCredentials = None
    fence: Fence = None
    disks: Disks = None
    unsafe_no_output_commit: UnsafeNoOutputCommit = False

    def options(self, primary: "Host", standby: "Host", last: "Options | None" = None) -> "Options":
        """For a replication from one to the other; what is not asked for is as it was `last`.

        Raises UsageError and RefusedError: it cannot be done so.
        """
        from vmckpt.replicate.arbiter import require_place
        from vmckpt.replicate.request import Options

        fence = _words(self.fence)
        here = primary.is_this_machine and standby.is_this_machine
        if fence and here:
            raise _fence_here()
        if last and not last.arbiter and self.lease is None:
            raise _not_known_there(primary, standby)
        place = self.lease or (last.arbiter if last else _default_place(here=here))
        asked = replace(
            last or Options(place), arbiter=place, holds_output=not self.unsafe_no_output_commit
        )
        if self.lease_credentials is not None or self.lease is not None:
            asked = replace(asked, credentials=self.lease_credentials or "")
        if fence:
            asked = replace(asked, fence=fence)
        if self.epoch is not None:
            epoch_s = None if self.epoch == AUTO else _duration_s("--epoch", self.epoch)
            asked = replace(asked, epoch_s=epoch_s)
        if self.disks is not None:
            asked = replace(asked, disks=self.disks.value)
        if self.max_pause is not None:
            pause_s = _duration_s("--max-pause", self.max_pause, LONGEST_PAUSE_S)
            asked = replace(asked, max_pause_s=pause_s)
        if self.lease_time is not None:
            asked = replace(asked, lease_s=_lease_s(self.lease_time))
        require_place(asked)
        _require_sense(asked)
        return asked


def asked_for_wishes(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes `wishes`, as one that has their options in its place."""
    asked = signature(Wishes).parameters

    @wraps(command)
    def with_options(**given: Any) -> None:
        wishes = Wishes(**{name: given.pop(name) for name in asked})
        command(wishes=wishes, **given)

    parameters = list[Parameter]()
    for own in signature(command).parameters.values():
        parameters += asked.values() if own.name == "wishes" else [own]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    with_options.__signature__ = signature(command).replace(  # type: ignore[attr-defined]
        parameters=parameters
    )
    return with_options


def _require_sense(options: "Options") -> None:
    """Raises RefusedError."""
    from vmckpt.errors import RefusedError
    from vmckpt.units import format_duration

    if options.epoch_s is None or options.epoch_s <= LONGEST_HELD_S or not options.holds_output:
        return
    epoch = format_duration(options.epoch_s)
    raise RefusedError(
        f"epochs of {epoch} would hold back what the guest sends for as long",
        why=f"nothing leaves before the standby has the state that sent it: up to {epoch} and more "
        "for each answer",
        remedy="choose epochs of 1 s at most, or let output out at once, by name: "
        "--unsafe-no-output-commit. Then a failover takes the guest back by up to an epoch, and "
        "what it has told others meanwhile it does not know any more",
    )


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
            f"--fence {fence!r} is no command",
            why=why,
            remedy="name a program and its arguments as a shell would take them",
        )
    return words


def _not_known_there(primary: "Host", standby: "Host") -> Exception:
    from vmckpt.errors import RefusedError

    return RefusedError(
        f"{primary.name} alone knows the last replication's arbiter and fencing agent",
        why=f"they are used on {standby.name} too, which was not told the same",
        remedy="name them again: --lease, and --lease-credentials and --fence if there were any",
    )


def _fence_here() -> Exception:
    from vmckpt.errors import RefusedError

    return RefusedError(
        "an agent has nothing to do between hosts of one machine",
        why="the standby kills the primary's processes by itself, and sees that they are gone",
        remedy="leave out --fence",
    )


def _duration_s(option: str, text: str, most_s: float = LONGEST_EPOCH_S) -> float:
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


def _lease_s(text: str) -> float:
    from vmckpt.errors import UsageError
    from vmckpt.units import parse_duration_s

    lease_s = parse_duration_s(text)
    if not SHORTEST_LEASE_S <= lease_s <= LONGEST_LEASE_S:
        raise UsageError(
            f"--lease-time {text} cannot be kept",
            why=f"it is from {SHORTEST_LEASE_S:g} s to {LONGEST_LEASE_S:g} s: a shorter one ends "
            "when the arbiter leaves one question unanswered, which pauses the guest; a longer one "
            "is more than a primary waits for a standby that took the term",
            remedy="write e.g. --lease-time 5s, or use --fence: it waits for no lease",
        )
    return lease_s


def _default_place(*, here: bool) -> str:
    from vmckpt.errors import RefusedError
    from vmckpt.hosts.inventory import state_dir

    if here:
        return str(state_dir() / "leases")
    raise RefusedError(
        "there is no arbiter",
        why="who may run the VM has to be written where both hosts read it",
        remedy="name a directory that both share, or an etcd cluster: --lease etcd:URL,URL...",
    )
