"""The facts of a checkpoint: all that a restore needs to know besides the content."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from vmckpt.errors import RefusedError, UsageError
from vmckpt.qemu.compare import GuestMachine, differences
from vmckpt.store.files.decoding import count, listed, mapping, number
from vmckpt.store.files.manifest import BLOCK_CHUNK_BYTES, PAGE_CHUNK_BYTES, Manifest
from vmckpt.vm.argv import macs
from vmckpt.vm.spec.spec import MAC, Spec, parse_spec

FORMAT = 1
_MOST, _MOST_DEVICES = 1 << 62, 4096
RAM, DEVICES = "ram", "device-state"
# The area of a VM saved as a whole (`whole.py`): QEMU's file.
SAVED = "saved"
EPOCH, FILE = "epoch", "file"
# Default limit of the guest's pause.
USUAL_PAUSE_S = 0.010
MAPPED_RAM, STREAM = "mapped-ram", "stream"
# What QEMU saves besides memory: devices and ROMs.
BESIDES_BYTES = 64 << 20
MOST_VCPUS = 288
_ID = re.compile(r"[0-9a-f]{32}")
# QEMU separates options by commas, so a machine type has none.
_PLATFORM = {
    "machine": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*"),
    "accel": re.compile("kvm|tcg"),
    "cpu": re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,-]*"),
}


def usual_pause_s(kind: str) -> float:
    """The default limit of the pause; 0: unlimited, for a VM saved as a whole."""
    return 0.0 if kind == FILE else USUAL_PAUSE_S


def most_saved_bytes(memory_bytes: int) -> int:
    """The largest file to which QEMU saves a VM of this memory."""
    return 2 * memory_bytes + BESIDES_BYTES


class UnknownFactsError(ValueError):
    """Written by another version of vmckpt."""


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """One disk of the VM. Only the content of a writable one is kept, in `area`."""

    path: str
    format: str
    size_bytes: int
    read_only: bool
    area: str | None


@dataclass(frozen=True, slots=True)
class DomainFacts:
    """A libvirt domain: its UUID, and its XML with secrets.

    `xml` is that of the running domain, `definition` that with which it starts the next time; "":
    it is transient.
    """

    uuid: str
    xml: str
    definition: str


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The facts of one checkpoint. Times are Unix seconds.

    `machine` is the hardware that the guest saw (`qemu.compare.Machine`), `firmware` the SHA-256 of
    its firmware code. `macs` are its NICs' addresses, in order.
    """

    name: str
    host: str
    taken_unix_s: float
    trigger: str
    tags: Mapping[str, str]
    spec: str
    platform: Mapping[str, str]
    qemu_version: str
    machine: Mapping[str, Any]
    firmware: str | None
    memory_bytes: int
    disks: tuple[DiskFacts, ...]
    macs: tuple[str, ...]
    pause_ms: float
    passes: int
    took_s: float
    changed_pages: int
    # `pause_ms` is the longest pause; this is the sum of all (0: not known).
    stopped_ms: float = 0.0
    # How it was taken: EPOCH or FILE; for FILE also the format of QEMU's file (`whole.py`).
    kind: str = "epoch"
    saved_as: str = ""
    # For a group's checkpoint: the group's "id" and "name", "members" (checkpoint ids by VM), and
    # "held_ms", how long output was held.
    group: Mapping[str, Any] | None = None
    # Proof that a site took it (`origin.py`).
    origin: Mapping[str, Any] | None = None
    # A libvirt domain's `DomainFacts`; its `spec` then only describes it.
    domain: "DomainFacts | None" = None

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        words = {"format": FORMAT, **asdict(self)}
        for name in ("group", "origin", "domain"):
            if words[name] is None:
                del words[name]  # older versions do not know these fields
        return words

    def shown(self) -> dict[str, Any]:
        """For people and programs: without a domain's XML, which has passwords."""
        words = self.to_json()
        if self.domain is not None:
            words["domain"] = {"uuid": self.domain.uuid}
        return words

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`, checking all types. Raises UnknownFactsError."""
        try:
            if data["format"] != FORMAT:
                raise UnknownFactsError("written by another version of vmckpt")
            given = {name: value for name, value in data.items() if name != "format"}
            read = {name: _READ[name](value) for name, value in given.items()}
            return cls(**read)
        except (LookupError, TypeError, ValueError) as exc:
            raise UnknownFactsError(f"{type(exc).__name__}: {exc}") from exc


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in the place of text")
    return value


def _maybe_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _texts(value: Any) -> dict[str, str]:
    return {_text(key): _text(one) for key, one in mapping(value).items()}


def _count(value: Any) -> int:
    return count(value, _MOST)


def _number(value: Any) -> float:
    return number(value, _MOST)


def _listed(value: Any) -> list[Any]:
    return listed([*value] if isinstance(value, tuple) else value, _MOST_DEVICES)


def _macs(value: Any) -> tuple[str, ...]:
    return tuple(_text(mac) for mac in _listed(value))


def _disks(value: Any) -> tuple[DiskFacts, ...]:
    return tuple(_disk(mapping(disk)) for disk in _listed(value))


def _disk(words: Mapping[str, Any]) -> DiskFacts:
    mapping(words, of=DiskFacts.__slots__)
    read_only = words["read_only"]
    if not isinstance(read_only, bool):
        raise TypeError("a disk is read-only or not")
    path, kind, area = _text(words["path"]), _text(words["format"]), _maybe_text(words["area"])
    return DiskFacts(path, kind, _count(words["size_bytes"]), read_only, area)


def _domain(value: Any) -> DomainFacts | None:
    if value is None:
        return None
    words = _texts(mapping(value, of=DomainFacts.__slots__))
    return DomainFacts(**words)


def _group(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    words = mapping(value)
    members = _texts(words["members"])
    record = {"id": _text(words["id"]), "name": _text(words["name"]), "members": members}
    return {**words, **record}


_READ: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("name", "host", "trigger", "spec", "qemu_version", "kind", "saved_as"), _text),
    **dict.fromkeys(("taken_unix_s", "pause_ms", "took_s", "stopped_ms"), _number),
    **dict.fromkeys(("memory_bytes", "passes", "changed_pages"), _count),
    **dict.fromkeys(("tags", "platform"), _texts),
    "machine": mapping,
    "firmware": _maybe_text,
    "disks": _disks,
    "macs": _macs,
    "group": _group,
    "origin": mapping,
    "domain": _domain,
}


def known_facts(data: Mapping[str, Any]) -> CheckpointFacts:
    """The facts of a checkpoint that is to be read. Raises RefusedError."""
    try:
        return CheckpointFacts.from_json(data)
    except UnknownFactsError as exc:
        raise _unknown(str(exc)) from exc


def usable_facts(manifest: Manifest) -> CheckpointFacts:
    """The facts of a checkpoint that is to run, checked for consistency with its areas.

    Raises RefusedError. They become a QEMU command line, and decide how images are written and
    opened.
    """
    facts = known_facts(manifest.facts)
    try:
        spec = _consistent(facts, manifest)
    except UnknownFactsError as exc:
        raise _unknown(str(exc)) from exc
    except UsageError as exc:
        raise _unknown(f"{exc.what}: {exc.why}") from exc
    # Before vmckpt read an adopted VM's NICs, it recorded addresses that these did not have.
    return facts if spec.adopted is None else replace(facts, macs=macs(spec))


def own_facts(manifest: Manifest) -> CheckpointFacts:
    """As `usable_facts`, for a VM of vmckpt's own. Raises RefusedError: it is a libvirt domain."""
    facts = usable_facts(manifest)
    if facts.domain is not None:
        raise RefusedError(
            f"checkpoint '{facts.name}' cannot become a VM of vmckpt's own",
            why="it is of a libvirt domain, whose machine libvirt makes",
            remedy="restore it into libvirt: vmckpt checkpoint restore; its disks alone: "
            "vmckpt checkpoint export-disk",
        )
    return facts


def _unknown(why: str) -> RefusedError:
    return RefusedError(
        "this vmckpt does not know this kind of checkpoint",
        why=why,
        remedy="use the vmckpt that took it, or a newer one",
    )


def _consistent(facts: CheckpointFacts, manifest: Manifest) -> Spec:
    """The spec, consistent with all else. Raises UnknownFactsError, UsageError (the spec)."""
    if not _ID.fullmatch(manifest.id):
        raise UnknownFactsError("it has no id")
    spec = parse_spec(facts.spec, "the checkpoint's spec", Path("/"))
    if spec.name != manifest.vm:
        raise UnknownFactsError(f"it is of '{manifest.vm}', and its spec of '{spec.name}'")
    if facts.platform.keys() != _PLATFORM.keys() or not all(
        rule.fullmatch(str(facts.platform[name])) for name, rule in _PLATFORM.items()
    ):
        raise UnknownFactsError("its platform is not a machine type, accelerator and CPU")
    if facts.memory_bytes != spec.memory_bytes or spec.vcpus > MOST_VCPUS:
        raise UnknownFactsError("its memory or vCPUs are not those of its spec")
    _require_memory(facts, manifest)
    nics = {len(spec.nics), len(macs(spec))}
    if len(facts.disks) != len(spec.disks) or len(facts.macs) not in nics:
        raise UnknownFactsError("its disks or NICs are not those of its spec")
    if not all(MAC.fullmatch(mac.lower()) for mac in facts.macs):
        raise UnknownFactsError("its NICs have no MAC addresses")
    for record, disk in zip(facts.disks, spec.disks, strict=True):
        if (record.format, record.read_only) != (disk.format, disk.read_only):
            raise UnknownFactsError(f"disk {disk.path} has a format other than its spec's")
        if record.size_bytes < 0:
            raise UnknownFactsError(f"disk {disk.path} has no size")
        if record.area is not None:
            whole = -(-record.size_bytes // BLOCK_CHUNK_BYTES) * BLOCK_CHUNK_BYTES
            _require_area(manifest, record.area, whole, BLOCK_CHUNK_BYTES)
        elif not record.read_only:  # its size would be bounded by nothing
            raise UnknownFactsError(f"disk {disk.path} has no content")
    return spec


def _require_memory(facts: CheckpointFacts, manifest: Manifest) -> None:
    """Raises UnknownFactsError."""
    if facts.kind == EPOCH:
        _require_area(manifest, RAM, facts.memory_bytes, PAGE_CHUNK_BYTES)
        return
    saved = manifest.area(SAVED) if facts.kind == FILE else None
    if saved is None or saved.size_bytes > most_saved_bytes(facts.memory_bytes):
        raise UnknownFactsError(f"it holds no memory of kind '{facts.kind}'")


def _require_area(manifest: Manifest, name: str, size_bytes: int, chunk_bytes: int) -> None:
    area = manifest.area(name)
    if area is None or (area.size_bytes, area.chunk_bytes) != (size_bytes, chunk_bytes):
        raise UnknownFactsError(f"what it holds of {name} is not what it says")


def machine_to_json(machine: GuestMachine) -> dict[str, Any]:
    """The value of `CheckpointFacts.machine`."""
    features = sorted([list(map(list, word)) for word in machine.features])
    return {**machine._asdict(), "features": features, "devices": dict(machine.devices)}


def machine_from_json(data: Mapping[str, Any]) -> GuestMachine:
    """The inverse of `machine_to_json`. Raises RefusedError: another site may write anything."""
    try:
        words = (tuple((name, value) for name, value in word) for word in data["features"])
        machine = GuestMachine(**{**data, "features": frozenset(words)})
        differences(machine, machine)  # reads all of it
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        raise _unknown(f"its machine is malformed ({type(exc).__name__}: {exc})") from exc
    return machine
