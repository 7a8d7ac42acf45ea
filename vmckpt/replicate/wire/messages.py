"""The payloads except pages (`pages`); each class is one kind of frame.

HELLO, WELCOME, FAILURE   JSON
BEGIN      base epoch, pages, disk bytes              3 x unsigned 64 bit, big-endian
DEVICE     one section (`sections`): a piece of the device state
BASE       one section: a piece of what precedes the device state, of this epoch and all after it
DISK       one section: how many writes (unsigned 32 bit, little-endian); for each its disk,
           offset and length (3 x unsigned 64 bit, little-endian); then their data. 2^63 added to
           the disk: zeroes were written, which have no data
DIGESTS    disk and first block (2 x unsigned 64 bit, big-endian); one section: the SHA-256 of each
           block of 64 KiB that the standby's copy holds, in order
COMMIT     frames, pages, device bytes, disk bytes    4 x unsigned 64 bit, big-endian
           CRC-32 over the heads' CRC-32s from BEGIN's on    unsigned 32 bit
ACK        empty: the head's epoch and all before it are safe with the standby
HEARTBEAT  bytes, heads included, received from the other side; a number that grows while the
           sender works on what it received    2 x unsigned 64 bit, big-endian
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, TypeVar

from vmckpt.foreign import MalformedError, parse
from vmckpt.replicate.wire.errors import WireError, protocol_violation
from vmckpt.replicate.wire.frames import Buffer
from vmckpt.replicate.wire.sections import Packer, unpack

# Both sides must speak the same; it changes when a frame or a payload does.
PROTOCOL = 5
_BEGIN = struct.Struct(">QQQ")
_COMMIT = struct.Struct(">QQQQI")
_HEARTBEAT = struct.Struct(">QQ")
_COUNT = struct.Struct("<I")
_WRITE = struct.Struct("<QQQ")
_ZEROES = 1 << 63
_DIGESTS = struct.Struct(">QQ")
# Of the other side's error, in characters: a service's status repeats it on one line.
_MOST_TEXT = 2000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HelloDisk:
    """A disk that is copied: writes name it by its index in HELLO."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Process:
    """A process that must be dead before another may act: pid, and start in ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Hello:
    """The primary's first frame. `holder` is its name with the arbiter, `host` where it runs.

    `machine` lets a fencing agent recognize that host; `emitters` are the processes there
    that can let the guest's output out or write its disks. `heartbeat_port`: where it listens to
    the standby over the second path; None: there is none.
    """

    vm: str
    holder: str
    host: str
    machine: str
    ram_bytes: int
    disks: tuple[HelloDisk, ...] = ()
    emitters: tuple[Process, ...] = ()
    heartbeat_port: int | None = None
    protocol: int = PROTOCOL

    def encode(self) -> list[Buffer]:
        """As a payload."""
        return [_json(asdict(self))]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The standby's first frame. `replica` is its name with the arbiter.

    `epoch`: the last complete one that it has; None: it has nothing. `heartbeat_port`: where it
    listens to the primary over the second path.
    """

    replica: str
    epoch: int | None = None
    heartbeat_port: int | None = None
    protocol: int = PROTOCOL

    def encode(self) -> list[Buffer]:
        """As a payload."""
        return [_json(asdict(self))]


class Begin(NamedTuple):
    """The start of an epoch, which builds on epoch `base` and all before it (0: an empty replica).

    `pages` and `disk_bytes`: the known amount; passes while the guest runs add to it.
    """

    base: int
    pages: int
    disk_bytes: int

    def encode(self) -> list[Buffer]:
        """As a payload."""
        return [_BEGIN.pack(*self)]


class Commit(NamedTuple):
    """The epoch's end: what must have arrived since BEGIN for it to be complete."""

    frames: int
    pages: int
    device_bytes: int
    disk_bytes: int
    crc: int

    def encode(self) -> list[Buffer]:
        """As a payload."""
        return [_COMMIT.pack(*self)]


class Heartbeat(NamedTuple):
    """The sender is alive, and has received this much, parts of frames included.

    `progress` grows while it works on that.
    """

    received_bytes: int
    progress: int

    def encode(self) -> list[Buffer]:
        """As a payload."""
        return [_HEARTBEAT.pack(*self)]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the sender ends the connection, in the words of an error."""

    kind: str
    what: str
    why: str
    remedy: str

    def encode(self) -> list[Buffer]:
        """As a payload."""
        return [_json(asdict(self))]


# Memory that a write takes on each side besides its data.
WRITE_BYTES = 256


class DiskWrite(NamedTuple):
    """The guest wrote at `offset_bytes` of the disk with that index in HELLO.

    It wrote `data`, or `zero_bytes` of zeroes.
    """

    disk: int
    offset_bytes: int
    data: Buffer
    zero_bytes: int = 0


class Digests(NamedTuple):
    """What the standby's copy of a disk holds from a block on, as consecutive digests."""

    disk: int
    first_block: int
    digests: Buffer


def encode_device(state: Sequence[Buffer], packer: Packer) -> list[Buffer]:
    """A DEVICE or BASE payload: a piece of it, which the next one continues."""
    return packer.pack(state)


def decode_device(payload: memoryview) -> memoryview:
    """The piece. Raises WireError."""
    return unpack(payload, 1)[0]


def encode_writes(writes: Sequence[DiskWrite], packer: Packer) -> list[Buffer]:
    """A DISK payload: writes in the order in which the guest made them."""
    table = [_COUNT.pack(len(writes))]
    for disk, offset, data, zero_bytes in writes:
        if zero_bytes:
            table.append(_WRITE.pack(disk | _ZEROES, offset, zero_bytes))
        else:
            table.append(_WRITE.pack(disk, offset, memoryview(data).nbytes))
    return packer.pack([b"".join(table), *(write.data for write in writes)])


def decode_writes(
    payload: memoryview, disks: Sequence[HelloDisk], most: float = math.inf
) -> list[DiskWrite]:
    """The writes, in order. Raises WireError, also if one is outside its disk or there are more
    than `most`, before they take memory.
    """
    (content,) = unpack(payload, 1)
    count = _unpacked(_COUNT, content[: _COUNT.size])[0]
    if count > most:
        raise protocol_violation("disk writes make an epoch too large", f"{count} in one frame")
    data_at = at = _COUNT.size + count * _WRITE.size
    if data_at > len(content):
        raise protocol_violation(
            "disk writes end too early", f"{count} writes in {len(content)} bytes"
        )
    found = []
    for named, offset, length in _WRITE.iter_unpack(content[_COUNT.size : data_at]):
        disk = named & ~_ZEROES
        if disk >= len(disks) or offset + length > disks[disk].size_bytes:
            raise protocol_violation(
                "a write is outside its disk", f"disk {disk}, {offset} + {length} bytes"
            )
        if named & _ZEROES:
            found.append(DiskWrite(disk, offset, b"", zero_bytes=length))
        else:
            found.append(DiskWrite(disk, offset, content[at : at + length]))
            at += length
    if at != len(content):
        raise protocol_violation("disk writes have another length", f"{at} bytes in {len(content)}")
    return found


def encode_digests(digests: Digests, packer: Packer) -> list[Buffer]:
    """A DIGESTS payload."""
    return [_DIGESTS.pack(digests.disk, digests.first_block), *packer.pack([digests.digests])]


def decode_digests(payload: memoryview, disks: Sequence[HelloDisk]) -> Digests:
    """Raises WireError."""
    disk, first_block = _unpacked(_DIGESTS, payload[: _DIGESTS.size])
    if disk >= len(disks):
        raise protocol_violation("digests are of no disk", f"disk {disk} of {len(disks)}")
    return Digests(disk, first_block, unpack(payload[_DIGESTS.size :], 1)[0])


def decode_hello(payload: Buffer) -> Hello:
    """Raises WireError, also if it is of another protocol, or names no process to fence."""
    value = _json_object(payload, "HELLO")
    disks = tuple(_made(HelloDisk, one) for one in _list(value, "disks"))
    emitters = tuple(_made(Process, one) for one in _list(value, "emitters"))
    if not emitters:
        raise protocol_violation(
            "HELLO names no process to fence", "its emitters are an empty list"
        )
    return _made(Hello, value | {"disks": disks, "emitters": emitters})


def decode_welcome(payload: Buffer) -> Welcome:
    """Raises WireError, also if it is of another protocol."""
    return _made(Welcome, _json_object(payload, "WELCOME"))


def decode_failure(payload: Buffer) -> Failure:
    """Truncates its text to what a status has room for. Raises WireError."""
    message = _made(Failure, _json_object(payload, "FAILURE"))
    return Failure(
        *(word[:_MOST_TEXT] for word in (message.kind, message.what, message.why, message.remedy))
    )


def decode_begin(payload: Buffer) -> Begin:
    """Raises WireError."""
    return Begin(*_unpacked(_BEGIN, payload))


def decode_commit(payload: Buffer) -> Commit:
    """Raises WireError."""
    return Commit(*_unpacked(_COMMIT, payload))


def decode_heartbeat(payload: Buffer) -> Heartbeat:
    """Raises WireError."""
    return Heartbeat(*_unpacked(_HEARTBEAT, payload))


def _unpacked(form: struct.Struct, payload: Buffer) -> tuple[int, ...]:
    if len(payload) != form.size:
        raise protocol_violation(
            "a payload has another length", f"{len(payload)} bytes, not {form.size}"
        )
    return form.unpack(payload)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _json_object(payload: Buffer, kind: str) -> dict[str, Any]:
    try:
        value = parse(bytes(payload))
    except MalformedError as exc:
        raise protocol_violation(f"{kind} is not valid JSON", str(exc)) from exc
    if not isinstance(value, dict):
        raise protocol_violation(f"{kind} is not an object", f"it is {type(value).__name__}")
    protocol = value.get("protocol", PROTOCOL)
    if protocol != PROTOCOL:
        raise WireError(
            "primary and standby speak different protocols",
            why=f"the other side's {kind} is of protocol {protocol!r:.20}, here is {PROTOCOL}",
            remedy="install the same vmckpt on both hosts",
        )
    return value


def _list(value: dict[str, Any], name: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list):
        raise protocol_violation(f"a message lacks {name}", f"it has {', '.join(value)}")
    return found


def _made(kind: type[T], value: object) -> T:
    """The message, with each field of the type that its class declares."""
    members = fields(kind)  # type: ignore[arg-type]
    if not isinstance(value, dict) or value.keys() != {member.name for member in members}:
        raise protocol_violation(f"{kind.__name__} has other fields", f"{value!r:.200}")
    for member in members:
        right = _SIMPLE.get(member.type, tuple)
        given = value[member.name]
        if not isinstance(given, right) or isinstance(given, bool):
            raise protocol_violation(
                f"{kind.__name__} has a wrong {member.name}", f"{given!r:.200}"
            )
        if isinstance(given, int) and given < 0:
            raise protocol_violation(f"{kind.__name__} has a negative {member.name}", str(given))
        if isinstance(given, int) and given > _MOST.get(member.name, given):
            raise protocol_violation(f"{kind.__name__} has a {member.name} too large", str(given))
        if isinstance(given, str) and "\0" in given:  # it becomes part of a command's environment
            raise protocol_violation(
                f"{kind.__name__} has a NUL in its {member.name}", f"{given!r:.200}"
            )
    return kind(**value)


_MOST = {"heartbeat_port": (1 << 16) - 1, "pid": (1 << 31) - 1}
_SIMPLE: dict[object, Any] = {str: str, int: int, int | None: int | None}
