"""Parse a domain's XML, as far as vmckpt needs it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from vmckpt.errors import UsageError

# <metadata><vmckpt:heartbeats xmlns:vmckpt="urn:vmckpt" id="1"/></metadata>
_HEARTBEATS = "metadata/{urn:vmckpt}heartbeats"
_AGENT = "devices/channel/target[@name='org.qemu.guest_agent.0']"
MOST_CHARS = 4 << 20
_UNITS = {"b": 1, "bytes": 1, "KB": 1000, "k": 1024, "KiB": 1024, "MB": 10**6, "M": 1 << 20,
          "MiB": 1 << 20, "GB": 10**9, "G": 1 << 30, "GiB": 1 << 30, "TiB": 1 << 40}  # fmt: skip


# Memory that other processes may map, or in huge pages; memory bound to nodes of its host.
_PLACED_OR_SHARED = (
    "memoryBacking",
    "cpu/numa/cell[@memAccess='shared']",
    "devices/memory[@access='shared']",
    "devices/memory/source",
)
_BOUND = ("numatune", "devices/memory/source/nodemask")


class DomainDisk(NamedTuple):
    """One disk. `path` is None if its source is not a file or block device (see `kind`)."""

    target: str
    kind: str
    path: Path | None
    format: str
    cache: str
    read_only: bool
    shareable: bool


class DomainInterface(NamedTuple):
    """One NIC: `kind` bridge, network, user, ...; `source` the bridge, network or device.

    `mac` is in lower case.
    """

    kind: str
    source: str
    mac: str = ""


class ImageFile(NamedTuple):
    """An image in a file: of a disk, or of a UEFI variable store."""

    path: Path
    format: str


class Description(NamedTuple):
    """The description of a domain. `accel` is the domain's type: kvm or qemu (TCG).

    `files` are those that its QEMU opens besides disks; `passed_through` are host devices.
    `variables`: its firmware's variable store; `has_tpm`: it has a TPM whose state is kept by its
    host; `huge_pages`: its memory is in the host's pool of huge pages; `guest_agent`: it has a port
    for the agent in the guest; `ram_blocks`: the sizes of its NUMA nodes and memory modules, each a
    block of its memory; `private_memory`: that is its QEMU's alone, in no file; `binds_memory`: it
    is bound to nodes of its host; `reports_free_pages`: what its guest frees reads as zeroes until
    the guest uses it again.
    """

    name: str
    uuid: str
    accel: str
    arch: str
    machine: str
    emulator: str
    cpu: str
    memory_bytes: int
    memory_back_ends: int
    ram_blocks: tuple[int, ...]
    vcpus: int
    disks: tuple[DomainDisk, ...]
    interfaces: tuple[DomainInterface, ...]
    files: tuple[Path, ...]
    passed_through: tuple[str, ...]
    variables: Path | None
    has_tpm: bool
    huge_pages: bool
    guest_agent: bool
    private_memory: bool
    binds_memory: bool
    reports_free_pages: bool
    heartbeat_id: int | None

    @property
    def accel_word(self) -> str:
        """The accelerator in vmckpt's terms: kvm or tcg."""
        return "tcg" if self.accel == "qemu" else self.accel


def parse_domain(xml: str) -> Description:
    """Parse libvirt's XML of a domain. Raises UsageError if it is not a domain."""
    root = parse_xml(xml, "a domain's XML")
    try:
        kind = root.find("os/type")
        if root.tag != "domain" or kind is None:
            raise ValueError("no <domain> with an <os><type>")
        memory = root.find("memory")
        heartbeats = root.find(_HEARTBEATS)
        return Description(
            name=root.findtext("name", ""),
            uuid=root.findtext("uuid", ""),
            accel=root.get("type", ""),
            arch=kind.get("arch", "x86_64"),
            machine=kind.get("machine", ""),
            emulator=root.findtext("devices/emulator", ""),
            cpu=_cpu(root),
            memory_bytes=_size(memory) if memory is not None else 0,
            memory_back_ends=len(root.findall("cpu/numa/cell"))
            + len(root.findall("devices/memory")),
            ram_blocks=tuple(_ram_blocks(root)),
            vcpus=int(root.findtext("vcpu", "1")),
            disks=tuple(_disk(disk) for disk in root.iterfind("devices/disk")),
            interfaces=tuple(_interface(nic) for nic in root.iterfind("devices/interface")),
            files=tuple(Path(text) for text in _files(root)),
            passed_through=tuple(_passed_through(root)),
            variables=store.path if (store := variables_of(root)) else None,
            has_tpm=root.find("devices/tpm/backend[@type='emulator']") is not None,
            huge_pages=root.find("memoryBacking/hugepages") is not None,
            private_memory=not any(root.find(path) is not None for path in _PLACED_OR_SHARED),
            binds_memory=any(root.find(path) is not None for path in _BOUND),
            reports_free_pages=root.find("devices/memballoon[@freePageReporting='on']") is not None,
            guest_agent=root.find(_AGENT) is not None,
            heartbeat_id=int(heartbeats.get("id", "")) if heartbeats is not None else None,
        )
    except (ValueError, KeyError) as exc:
        raise unreadable("a domain's XML", f"{type(exc).__name__}: {exc}") from exc


def files_in(xml: str) -> list[ImageFile]:
    """All files that a domain's XML names: its disks, what these are based on, its firmware.

    Raises UsageError if it is not XML.
    """
    root = parse_xml(xml, "a domain's XML")
    disks = [(_disk(disk).path, _disk(disk).format) for disk in root.iterfind("devices/disk")]
    below = [
        (source.get("file") or source.get("dev"), _format_of(element))
        for element in root.iterfind("devices/disk//source/..")
        if element.tag != "disk"
        for source in element.findall("source")
    ]
    others = [(text, "raw") for text in _files(root)]
    found = [ImageFile(Path(path), kind) for path, kind in (*disks, *below, *others) if path]
    return [*found, *([store] if (store := variables_of(root)) else [])]


def _format_of(element: ElementTree.Element) -> str:
    kind = element.find("format")
    return "raw" if kind is None else kind.get("type", "raw")


def parse_xml(text: str, what: str) -> ElementTree.Element:
    """Parse libvirt's XML; returns the root. Raises UsageError.

    Others define this XML: its size is limited, and it may not declare entities.
    """
    if len(text) > MOST_CHARS:
        raise unreadable(what, f"it has {len(text)} characters, more than {MOST_CHARS}")
    if "<!DOCTYPE" in text:
        raise unreadable(what, "it declares a document type, which libvirt's own never does")
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, RecursionError) as exc:
        raise unreadable(what, f"{type(exc).__name__}: {exc}") from exc


def unreadable(what: str, why: str) -> UsageError:
    """The error for libvirt XML that vmckpt cannot read."""
    return UsageError(f"{what} cannot be read", why=why, remedy="see it by virsh, and correct it")


def _size(element: ElementTree.Element) -> int:
    return int(element.text or "0") * _UNITS[element.get("unit", "KiB")]


def _ram_blocks(root: ElementTree.Element) -> Iterator[int]:
    modules = [_size(size) for size in root.iterfind("devices/memory/target/size")]
    cells = root.findall("cpu/numa/cell")
    for cell in cells:
        yield int(cell.get("memory", "0")) * _UNITS[cell.get("unit", "KiB")]
    if not cells and (memory := root.find("memory")) is not None:
        yield _size(memory) - sum(modules)
    yield from modules


def _cpu(root: ElementTree.Element) -> str:
    cpu = root.find("cpu")
    if cpu is None:
        return "default"
    return cpu.findtext("model") or str(cpu.get("mode", "default"))


def _disk(disk: ElementTree.Element) -> DomainDisk:
    source, driver, target = disk.find("source"), disk.find("driver"), disk.find("target")
    file = None
    if source is not None:
        file = source.get("file") or source.get("dev")
    return DomainDisk(
        target="" if target is None else target.get("dev", ""),
        kind="empty" if source is None else disk.get("type", "file"),
        path=Path(file) if file else None,
        format="raw" if driver is None else driver.get("type", "raw"),
        cache="default" if driver is None else driver.get("cache", "default"),
        read_only=disk.find("readonly") is not None,
        shareable=disk.find("shareable") is not None,
    )


def _interface(nic: ElementTree.Element) -> DomainInterface:
    kind, source, address = nic.get("type", ""), nic.find("source"), nic.find("mac")
    mac = "" if address is None else address.get("address", "").lower()
    if source is None:
        return DomainInterface(kind, "", mac)
    of = source.get("network") or source.get("bridge") or source.get("dev") or ""
    return DomainInterface(kind, of, mac)


def _files(root: ElementTree.Element) -> Iterator[str]:
    for name in ("kernel", "initrd", "dtb", "loader"):
        if text := root.findtext(f"os/{name}"):
            yield text


def variables_of(root: ElementTree.Element) -> ImageFile | None:
    """Its UEFI variable store; None: it has none, or not in a file."""
    element = root.find("os/nvram")
    if element is None:
        return None
    source = element.find("source")  # the source may be on the network, not a file
    path = (element.text or "").strip() if source is None else source.get("file")
    return ImageFile(Path(path), element.get("format", "raw")) if path else None


def _passed_through(root: ElementTree.Element) -> Iterator[str]:
    for device in root.iterfind("devices/hostdev"):
        alias = device.find("alias")
        name = alias.get("name", "") if alias is not None else ""
        yield f"{device.get('type', 'host')} device {name}".rstrip()
    for nic in root.iterfind("devices/interface[@type='hostdev']"):
        mac = nic.find("mac")
        yield f"NIC {mac.get('address') if mac is not None else ''}".rstrip()
