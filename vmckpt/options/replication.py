"""The options of a replication."""

from dataclasses import dataclass

from vmckpt.errors import RefusedError, UsageError
from vmckpt.units import format_duration

# The prefix of an arbiter's location in etcd.
ETCD = "etcd:"
COPY, SHARED = "copy", "shared"
# The bounds of an epoch, and of a pause.
SHORTEST_S, LONGEST_EPOCH_S, LONGEST_PAUSE_S = 0.001, 3600.0, 10.0
# Output is not held longer than this: longer epochs need --unsafe-no-output-commit.
LONGEST_HELD_S = 1.0
# A shorter lease would expire, and pause the guest, when one request to the arbiter gets no answer;
# a longer one may take longer than the wait for a standby that has taken the term
# (`keeper.GIVEN_UP_S`). Tests tie both to the constants that they follow from.
SHORTEST_LEASE_S, LONGEST_LEASE_S = 2.5, 10.0


@dataclass(frozen=True, slots=True)
class ReplicationOptions:
    """The options of a replication. `epoch_s` of None: adaptive.

    `arbiter`: the location of the leases (`replicate/arbiter.py`); `credentials`: the path, on both
    hosts, of the file to authenticate with there ("": none). `fence`: the command line of a fencing
    agent (`replicate/fencing/agent.py`); empty: the standby kills the primary's QEMU, or waits.
    `holds_output`: no packet of the guest is released before the standby has the state that sent
    it. `lease_s`: the wait for a silent primary that is not fenced. `disks`: COPY, the standby
    copies the writable ones; SHARED, both hosts see the same files.
    """

    arbiter: str
    fence: tuple[str, ...] = ()
    epoch_s: float | None = 0.025
    max_pause_s: float = 0.010
    holds_output: bool = True
    lease_s: float = 3.0
    credentials: str = ""
    disks: str = COPY

    def require_sense(self, *, one_machine: bool) -> None:
        """Raises UsageError: a time is out of bounds, or a password is in an address; RefusedError:
        output would be held for too long, or an agent is named between hosts of one machine.
        """
        if self.arbiter.startswith(ETCD) and "@" in self.arbiter:
            raise UsageError(
                "an address of etcd has a user or a password in it",
                why="addresses are recorded on both hosts, and shown; what is before an @ is not "
                "used",
                remedy="write https://HOST:PORT, change that password, and name a file that has "
                "it: --lease-credentials FILE",
            )
        if self.epoch_s is not None:
            _require_within("--epoch 25ms", self.epoch_s, SHORTEST_S, LONGEST_EPOCH_S)
        _require_within("--max-pause 25ms", self.max_pause_s, SHORTEST_S, LONGEST_PAUSE_S)
        _require_within(
            "--lease-time 5s", self.lease_s, SHORTEST_LEASE_S, LONGEST_LEASE_S,
            because=": a shorter one ends when the arbiter leaves one question unanswered, which "
            "pauses the guest; a longer one is more than a primary waits for a standby that took "
            "the term",
            otherwise=", or use --fence: it waits for no lease",
        )  # fmt: skip
        if self.fence and one_machine:
            raise RefusedError(
                "an agent has nothing to do between hosts of one machine",
                why="the standby kills the primary's processes by itself, and sees that they are "
                "gone",
                remedy="leave out --fence",
            )
        if self.holds_output and self.epoch_s is not None and self.epoch_s > LONGEST_HELD_S:
            epoch = format_duration(self.epoch_s)
            raise RefusedError(
                f"epochs of {epoch} would hold the guest's output for as long",
                why=f"nothing leaves before the standby has the state that sent it: up to {epoch} "
                "and more for each answer",
                remedy="choose epochs of 1 s at most, or release output at once: "
                "--unsafe-no-output-commit. A failover then returns the guest to a state up to an "
                "epoch old, which does not include output that it has sent since",
            )


def _require_within(
    example: str, given_s: float, shortest_s: float, longest_s: float, *,
    because: str = "", otherwise: str = "",
) -> None:  # fmt: skip
    if not shortest_s <= given_s <= longest_s:
        raise UsageError(
            f"{example.split(maxsplit=1)[0]} {format_duration(given_s)} cannot be kept",
            why=f"it is from {shortest_s:g} s to {longest_s:g} s{because}",
            remedy=f"write e.g. {example}{otherwise}",
        )
