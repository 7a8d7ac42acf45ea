"""The spec of a VM (TOML) as a value, with errors that name the line and the key."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.errors import UsageError
from vmckpt.foreign import MalformedError, parse, parse_toml
from vmckpt.units import MIB
from vmckpt.vm.adopted.holes import RAM
from vmckpt.vm.passthrough.passthrough import Passthrough, read_passthrough
from vmckpt.vm.paths import IMAGES
from vmckpt.vm.spec.toml_table import TableSource, TomlTable

MIN_MEMORY_BYTES = 16 * MIB
MAC = re.compile(r"([0-9a-f]{2}:){5}[0-9a-f]{2}")
# Options of an adopted machine that are read again, for its networks and disks.
_READ = ("blockdev", "device", "machine", "nic", "net", "netdev")
IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Boot(NamedTuple):
    """Direct kernel boot. Paths on the host."""

    kernel: Path
    initrd: Path | None
    cmdline: str


class Firmware(NamedTuple):
    """UEFI: read-only code and the VM's own variable store. Paths on the host."""

    code: Path
    vars: Path


class Disk(NamedTuple):
    """One disk. `size_bytes` is set if vmckpt is to create a missing image.

    `path` is absolute, or relative to a host's state directory: an image in the host's own folder.
    `node` is its block node in every QEMU that vmckpt starts.
    """

    path: Path
    format: str
    size_bytes: int | None
    read_only: bool
    cache: str
    node: str

    def on(self, state_dir: Path) -> Path:
        """The path of its image on the host with that state directory."""
        return state_dir / self.path


class Nic(NamedTuple):
    """One virtio NIC: on the host's bridge, or behind QEMU's user-mode NAT.

    An `isolated` one is the same device to the guest, but connected to nothing.
    """

    network: str
    mac: str | None
    isolated: bool = False


class Adopted(NamedTuple):
    """An adopted machine: the part of its command line that every QEMU of it gets.

    `arguments` has placeholders for what belongs to one QEMU (see adopted.holes). On every host
    `files` must be readable, and TCP ports `forwards` free. `domain` is libvirt's XML of a machine
    that was a domain.
    """

    arguments: tuple[str, ...]
    files: tuple[Path, ...]
    forwards: tuple[int, ...]
    domain: str = ""


class Placement(NamedTuple):
    """Where `vmckpt drain` may put it. Labels name what several VMs have in common.

    VMs that share a label in `apart` go to different hosts, those that share one in `together` to
    the same host; all only to one of `hosts`, if any are named.
    """

    apart: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


class Spec(NamedTuple):
    """A VM as its owner describes it. `text` is the TOML it was read from.

    For an `adopted` VM the command line counts, and the rest describes what is in it.
    """

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
    passthrough: tuple[Passthrough, ...]
    guest_agent: bool
    sandbox: bool
    ram_dir: Path
    heartbeat_id: int | None
    overcommit: bool
    autostart: bool
    placement: Placement
    adopted: Adopted | None
    text: str

    @property
    def is_isolated(self) -> bool:
        """Whether any NIC is isolated; then all other connections to networks are cut off, too."""
        return any(nic.isolated for nic in self.nics)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that its QEMU opens by path, without disks."""
        boot = (self.boot.kernel, self.boot.initrd) if self.boot else ()
        found = (*boot, *(self.firmware or ()), *(self.adopted.files if self.adopted else ()))
        return tuple(path for path in found if path is not None)


def parse_spec(text: str, source: str, base: Path) -> Spec:
    """The spec in `text`; `source` names it in errors.

    Relative paths count from the key `base` in the spec, without one from the argument. Raises
    UsageError with the line and the key.
    """
    try:
        data = parse_toml(text)
    except MalformedError as exc:
        raise UsageError(
            f"{source} is not valid TOML", why=str(exc), remedy="fix that line"
        ) from exc
    top = TomlTable(data, TableSource(text, source, base), ())
    if top.has("base"):
        top = TomlTable(data, TableSource(text, source, top.absolute("base")), ())
        top.absolute("base")
    adopted = top.table("adopted")
    spec = Spec(
        name=top.name("name", "VM"),
        memory_bytes=top.size("memory"),
        vcpus=top.integer("vcpus", 1, least=1),
        machine=top.text("machine", "q35"),
        accel=top.choice("accel", ("auto", "kvm", "tcg"), "auto"),
        cpu=top.text("cpu", "auto"),
        boot=_boot(top.table("boot")),
        firmware=_firmware(top.table("firmware")),
        disks=tuple(
            _disk(table, number, is_adopted=adopted is not None)
            for number, table in enumerate(top.tables("disks"))
        ),
        nics=tuple(_nic(table) for table in top.tables("nics")),
        devices=tuple(_device(table) for table in top.tables("devices")),
        passthrough=tuple(read_passthrough(table) for table in top.tables("passthrough")),
        guest_agent=top.boolean("guest_agent", False),
        sandbox=top.boolean("sandbox", adopted is None),
        ram_dir=top.path("ram_dir", "/dev/shm"),
        heartbeat_id=top.optional_integer("heartbeat_id"),
        overcommit=top.boolean("overcommit", False),
        autostart=top.boolean("autostart", False),
        placement=_placement(top.table("placement")),
        adopted=_adopted(adopted),
        text=text,
    )
    top.no_more_keys()
    if spec.memory_bytes < MIN_MEMORY_BYTES or spec.memory_bytes % MIB:
        raise top.wrong("memory", "memory is a whole number of MiB, at least 16", "write e.g. 512M")
    _check_passthrough(spec, top)
    return spec


def _check_passthrough(spec: Spec, top: TomlTable) -> None:
    names = [device.id for device in spec.passthrough]
    if len(set(names)) < len(names):
        raise top.wrong("passthrough", "two devices have the same id", "give each its own")
    if names and not spec.machine.startswith(("q35", "pc-q35")):
        why = f"a {spec.machine} has no ports that devices are plugged into"
        raise top.wrong("machine", why, 'write machine = "q35"')
    stand_ins = [device.nic for device in spec.passthrough if device.nic is not None]
    if len(set(stand_ins)) < len(stand_ins) or any(not 0 <= n < len(spec.nics) for n in stand_ins):
        why = "each failover device has a [[nics]] of its own that stands in for it"
        raise top.wrong("passthrough", why, "number them from 0, in the order of [[nics]]")
    if any(one.hook and not one.ssh for one in spec.passthrough) and not spec.guest_agent:
        why = "hooks are run by the guest agent, or by SSH"
        remedy = 'write guest_agent = true, and run it in the guest; or ssh = "ssh://USER@GUEST"'
        raise top.wrong("passthrough", why, remedy)


def anchored(spec: Spec, base: Path) -> str:
    """The spec's TOML made independent of its location: it contains `base`."""
    if "base" in parse_toml(spec.text):
        return spec.text
    return f"base = {json.dumps(str(base), ensure_ascii=False)}\n{spec.text}"


def _boot(table: TomlTable | None) -> Boot | None:
    if table is None:
        return None
    initrd = table.path("initrd") if table.has("initrd") else None
    boot = Boot(table.path("kernel"), initrd, table.text("cmdline", ""))
    table.no_more_keys()
    return boot


def _firmware(table: TomlTable | None) -> Firmware | None:
    if table is None:
        return None
    firmware = Firmware(table.path("code"), table.path("vars"))
    table.no_more_keys()
    return firmware


def _placement(table: TomlTable | None) -> Placement:
    if table is None:
        return Placement()
    found = Placement(table.texts("apart"), table.texts("together"), table.texts("hosts"))
    table.no_more_keys()
    return found


def _adopted(table: TomlTable | None) -> Adopted | None:
    if table is None:
        return None
    adopted = Adopted(
        table.texts("arguments"),
        tuple(Path(text) for text in table.texts("files")),
        table.integers("forwards"),
        table.text("domain", ""),
    )
    table.no_more_keys()
    for option, value in pairwise(("", *adopted.arguments)):
        # What vmckpt reads of it later; QEMU reads all.
        if value.startswith("{") and (option.lstrip("-") in _READ or RAM in value):
            try:
                parse(value, any_text=True)
            except MalformedError as exc:
                why = f"of {option or 'the first'}: {exc}"
                raise table.wrong("arguments", why, "see QEMU's manual") from exc
    return adopted


def _disk(table: TomlTable, number: int, *, is_adopted: bool) -> Disk:
    disk = Disk(
        path=_image(table),
        format=table.choice("format", ("qcow2", "raw"), "qcow2"),
        size_bytes=table.size("size") if table.has("size") else None,
        read_only=table.boolean("read_only", False),
        cache=table.choice("cache", ("none", "writeback"), "none"),
        node=table.text("node") if is_adopted else f"disk{number}",
    )
    table.no_more_keys()
    return disk


def _image(table: TomlTable) -> Path:
    if not table.has("image"):
        return table.path("path")
    name = table.text("image")
    if table.has("path"):
        raise table.wrong("image", "a disk has a path or an image, not both", "leave out one")
    if not IMAGE_NAME.fullmatch(name):
        raise table.wrong("image", "it is the name of a file", "write letters, digits and . _ -")
    return Path(IMAGES) / name


def _nic(table: TomlTable) -> Nic:
    mac = table.text("mac").lower() if table.has("mac") else None
    if mac is not None and not MAC.fullmatch(mac):
        raise table.wrong(
            "mac", "a MAC address is six pairs of hex digits", "write e.g. 52:54:00:12:34:56"
        )
    network = table.choice("network", ("bridge", "user"), "bridge")
    nic = Nic(network, mac, table.boolean("isolated", False))
    table.no_more_keys()
    return nic


def _device(table: TomlTable) -> dict[str, Any]:
    table.text("driver")
    return table.plain()
