"""The test guest's replies, as types (images/README.md). Lines in, facts or errors out."""

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from vmckpt.errors import HostDownError, RefusedError, VmckptError


class GuestSilentError(HostDownError):
    """The guest closed the connection or did not answer in time; what it did is unknown."""


class GuestRefusedError(RefusedError):
    """The guest answered `error`: it cannot parse or perform the request, and changed nothing."""


class ContinuityError(VmckptError):
    """A connection lost, repeated or reordered a request: a migration must never do that."""


@dataclass(frozen=True, slots=True)
class MemLoad:
    """The current memory load: `pages` pages, dirtied at `rate` bytes/s, 4096 bytes per touch."""

    pages: int
    rate: int
    pattern: str
    content: str
    touch: str


@dataclass(frozen=True, slots=True)
class MemCheck:
    """A check of every page. `wrong` is of this check; `errors` counts all faults since boot."""

    pages: int
    wrong: int
    sum_right: bool
    errors: int
    touches: int
    took_ms: int

    @property
    def sound(self) -> bool:
        """Nothing has gone wrong since the guest booted."""
        return self.wrong == 0 and self.sum_right and self.errors == 0


@dataclass(frozen=True, slots=True)
class DiskLoad:
    """The current ring of records: `slots` records of 4096 bytes, of which `seq` was the last."""

    slots: int
    seq: int
    rate: int


@dataclass(frozen=True, slots=True)
class DiskCheck:
    """A check of every record of the ring's last lap, up to the last acknowledged, `seq`.

    `wrong` are those missing or damaged, the first being `first_wrong` (0: none); `errors` counts
    all faults since boot, and counts a record again with every check that finds it wrong.
    """

    records: int
    wrong: int
    first_wrong: int
    seq: int
    errors: int
    took_ms: int

    @property
    def sound(self) -> bool:
        """Nothing has gone wrong since the guest booted."""
        return self.wrong == 0 and self.errors == 0


@dataclass(frozen=True, slots=True)
class GuestStat:
    """The guest's own report. `boot` changes with every boot; rates are bytes per second."""

    boot: str
    uptime_ms: int
    connections: int
    requests: int
    mem_pages: int
    mem_rate: int
    mem_touches: int
    mem_checked: int
    mem_errors: int
    disk_slots: int
    disk_rate: int
    disk_seq: int
    disk_errors: int
    heartbeat_seq: int
    heartbeat_refused: int


@dataclass(frozen=True, slots=True)
class Talk:
    """Messages to and from all other guests, in total; `wrong`: TCP messages out of order."""

    peers: int
    rate: int
    udp_sent: int
    udp_heard: int
    tcp_sent: int
    tcp_heard: int
    wrong: int


Reply = TypeVar("Reply", MemLoad, MemCheck, DiskLoad, DiskCheck, GuestStat, Talk)


def parse_fields(request: str, line: str) -> dict[str, str]:
    """The `key=value` words of an `ok` line; unknown ones are kept, so that guests may report more.

    Raises GuestRefusedError with the guest's own words for `error`, GuestSilentError for a line
    that is neither (the other end is not a test guest, or the stream is out of step).
    """
    status, _, rest = line.partition(" ")
    if status == "error":
        raise GuestRefusedError(
            f"the guest refused '{request}'", why=rest, remedy="see images/README.md for requests"
        )
    if status != "ok":
        raise _out_of_step(request, line)
    return dict(word.split("=", 1) for word in rest.split() if "=" in word)


def parse_reply(kind: type[Reply], request: str, line: str) -> Reply:
    """An `ok` line as `kind`; raises as parse_fields does, and so for a field that is missing."""
    reply = parse_fields(request, line)
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    try:
        for field in dataclasses.fields(kind):
            text = reply[field.name]
            # bool is converted via int: the guest sends 0 and 1.
            values[field.name] = text if hints[field.name] is str else hints[field.name](int(text))
    except (KeyError, ValueError) as error:
        raise _out_of_step(request, line) from error
    return kind(**values)


def parse_numbered(request: str, line: str, *, expected: int) -> str:
    """What follows `ok N` when N is `expected`, the number of requests made on the connection.

    Raises ContinuityError for another number, GuestRefusedError for `error N ...`.
    """
    status, _, rest = line.partition(" ")
    number, _, value = rest.partition(" ")
    if status not in {"ok", "error"} or not number.isdecimal():
        raise _out_of_step(request, line)
    if int(number) != expected:
        raise ContinuityError(
            f"request {expected} on this connection, '{request}', was answered as number {number}",
            why="the connection lost or doubled a request, or the guest went back in time",
            remedy="keep the guest, and look for what happened to it just before",
        )
    if status == "error":
        raise GuestRefusedError(
            f"the guest refused '{request}'", why=value, remedy="see images/README.md for requests"
        )
    return value


def _out_of_step(request: str, line: str) -> GuestSilentError:
    return GuestSilentError(
        f"no reply to '{request}'",
        why=f"the other end said '{line[:120]}'",
        remedy="is it the test guest of this version of images/?",
    )
