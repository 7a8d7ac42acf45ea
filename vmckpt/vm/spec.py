"""What a VM is: the spec (TOML) as a value, with errors that name the line and the key."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmckpt.errors import UsageError
from vmckpt.hosts.inventory import check_name
from vmckpt.units import MIB, parse_size_bytes

MIN_MEMORY_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Boot:
    """Direct kernel boot. Paths on the host."""

    kernel: Path
    initrd: Path | None
    cmdline: str


@dataclass(frozen=True, slots=True)
class Firmware:
    """UEFI: read-only code and the VM's own variable store. Paths on the host."""

    code: Path
    vars: Path


@dataclass(frozen=True, slots=True)
class Disk:
    """One virtio disk. `size_bytes` is set when vmckpt shall create a missing image."""

    path: Path
    format: str
    size_bytes: int | None
    read_only: bool
    cache: str


@dataclass(frozen=True, slots=True)
class Nic:
    """One virtio NIC: on the host's bridge, or behind QEMU's user-mode NAT."""

    network: str
    mac: str | None


@dataclass(frozen=True, slots=True)
class Spec:
    """A VM as its owner describes it. `text` is the TOML it was read from."""

    name: str
    memory_bytes: int
    vcpus: int
    machine: str
    accel: str
    cpu: str
    boot: Boot | None
    firmware: Firmware | None
    disks: tuple[Disk, ...]
    nics: tuple[Nic, ...]
    devices: tuple[dict[str, Any], ...]
    guest_agent: bool
    ram_dir: Path
    heartbeat_id: int | None
    text: str


def parse_spec(text: str, source: str, base: Path) -> Spec:
    """The spec in `text`; relative paths count from `base`; `source` names it in errors.

    Raises UsageError with the line and the key.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise UsageError(f"{source} is no TOML", why=str(exc), remedy="mend that line") from exc
    top = _Table(data, _Source(text, source, base), ())
    spec = Spec(
        name=check_name(top.text("name"), "VM"),
        memory_bytes=top.size("memory"),
        vcpus=top.integer("vcpus", 1, least=1),
        machine=top.text("machine", "q35"),
        accel=top.choice("accel", ("auto", "kvm", "tcg"), "auto"),
        cpu=top.text("cpu", "auto"),
        boot=_boot(top.table("boot")),
        firmware=_firmware(top.table("firmware")),
        disks=tuple(_disk(table) for table in top.tables("disks")),
        nics=tuple(_nic(table) for table in top.tables("nics")),
        devices=tuple(_device(table) for table in top.tables("devices")),
        guest_agent=top.boolean("guest_agent", False),
        ram_dir=top.path("ram_dir", "/dev/shm"),
        heartbeat_id=top.optional_integer("heartbeat_id"),
        text=text,
    )
    top.no_more_keys()
    if spec.memory_bytes < MIN_MEMORY_BYTES or spec.memory_bytes % MIB:
        raise top.wrong("memory", "memory is a whole number of MiB, at least 16", "write e.g. 512M")
    return spec


def absolute_text(spec: Spec, base: Path) -> str:
    """The spec's TOML with relative paths made absolute: it means the same from anywhere."""

    def absolute(match: re.Match[str]) -> str:
        return f'{match[1]}"{base / match[2]}"'

    return re.sub(
        r'(?m)^(\s*(?:path|kernel|initrd|code|vars)\s*=\s*)"([^"/][^"]*)"', absolute, spec.text
    )


def _boot(table: "_Table | None") -> Boot | None:
    if table is None:
        return None
    initrd = table.path("initrd") if table.has("initrd") else None
    boot = Boot(table.path("kernel"), initrd, table.text("cmdline", ""))
    table.no_more_keys()
    return boot


def _firmware(table: "_Table | None") -> Firmware | None:
    if table is None:
        return None
    firmware = Firmware(table.path("code"), table.path("vars"))
    table.no_more_keys()
    return firmware


def _disk(table: "_Table") -> Disk:
    disk = Disk(
        path=table.path("path"),
        format=table.choice("format", ("qcow2", "raw"), "qcow2"),
        size_bytes=table.size("size") if table.has("size") else None,
        read_only=table.boolean("read_only", False),
        cache=table.choice("cache", ("none", "writeback"), "none"),
    )
    table.no_more_keys()
    return disk


def _nic(table: "_Table") -> Nic:
    mac = table.text("mac").lower() if table.has("mac") else None
    if mac is not None and not re.fullmatch(r"([0-9a-f]{2}:){5}[0-9a-f]{2}", mac):
        raise table.wrong(
            "mac", "a MAC address is six pairs of hex digits", "write e.g. 52:54:00:12:34:56"
        )
    nic = Nic(table.choice("network", ("bridge", "user"), "bridge"), mac)
    table.no_more_keys()
    return nic


def _device(table: "_Table") -> dict[str, Any]:
    table.text("driver")
    return table.data


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the keys stand, for errors."""

    text: str
    name: str
    base: Path

    def line_of(self, where: tuple[str | int, ...], key: str) -> int:
        """The line of `key` in the table `where` ("disks", 1); the table's where it is missing."""
        lines = self.text.splitlines()
        start = 0
        if where:
            headers = [
                n for n, line in enumerate(lines) if re.match(rf"\s*\[\[?\s*{where[0]}\s*\]", line)
            ]
            number = where[1] if len(where) > 1 and isinstance(where[1], int) else 0
            start = headers[number] if number < len(headers) else 0
        for number in range(start, len(lines)):
            if re.match(rf'\s*"?{re.escape(key)}"?\s*=', lines[number]):
                return number + 1
            if number > start and re.match(r"\s*\[", lines[number]):
                break
        return start + 1


class _Table:
    """One TOML table, read key by key; what nobody read is an error."""

    def __init__(self, data: dict[str, Any], source: _Source, where: tuple[str | int, ...]) -> None:
        self.data, self._source, self._where = data, source, where
        self._read: set[str] = set()

    def wrong(self, key: str, why: str, remedy: str) -> UsageError:
        """An error at `key`."""
        place = ".".join([*(str(part) for part in self._where), key])
        line = self._source.line_of(self._where, key)
        return UsageError(
            f"{self._source.name}, line {line}: '{place}' is wrong", why=why, remedy=remedy
        )

    def has(self, key: str) -> bool:
        """Whether `key` is there."""
        return key in self.data

    def _get(self, key: str, kind: type, default: Any = None) -> Any:
        self._read.add(key)
        if key not in self.data:
            if default is None:
                raise self.wrong(key, "it is missing", f"add {key} = ...")
            return default
        value = self.data[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.wrong(key, f"it has to be a {kind.__name__}, not {value!r}", "mend its type")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return str(self._get(key, str, default))

    def integer(self, key: str, default: int, *, least: int) -> int:
        """A whole number, at least `least`."""
        value = int(self._get(key, int, default))
        if value < least:
            raise self.wrong(key, f"it has to be at least {least}", "choose a larger number")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A whole number, or None where there is none."""
        return int(self._get(key, int)) if self.has(key) else None

    def boolean(self, key: str, default: bool) -> bool:
        """A TOML boolean."""
        return bool(self._get(key, bool, default))

    def choice(self, key: str, values: tuple[str, ...], default: str) -> str:
        """One of `values`."""
        value = self.text(key, default)
        if value not in values:
            raise self.wrong(
                key, f"it has to be one of {', '.join(values)}, not '{value}'", "choose one of them"
            )
        return value

    def size(self, key: str) -> int:
        """Bytes, from text with a unit."""
        try:
            return parse_size_bytes(self.text(key))
        except UsageError as exc:
            raise (
                exc if "line" in exc.what else self.wrong(key, f"{exc.what}; {exc.why}", exc.remedy)
            ) from exc

    def path(self, key: str, default: str | None = None) -> Path:
        """A path, made absolute against the spec's directory."""
        return self._source.base / self.text(key, default)

    def table(self, key: str) -> "_Table | None":
        """A sub-table, None when it is missing."""
        if not self.has(key):
            return None
        return _Table(self._get(key, dict), self._source, (key,))

    def tables(self, key: str) -> list["_Table"]:
        """An array of tables, empty when it is missing."""
        items = self._get(key, list, [])
        if not all(isinstance(item, dict) for item in items):
            raise self.wrong(key, "it has to be an array of tables", f"write [[{key}]]")
        return [_Table(item, self._source, (key, number)) for number, item in enumerate(items)]

    def no_more_keys(self) -> None:
        """Raises UsageError when there is a key that nothing read."""
        for key in self.data:
            if key not in self._read:
                known = ", ".join(sorted(self._read))
                raise self.wrong(key, "there is no such key", f"the keys here are: {known}")
