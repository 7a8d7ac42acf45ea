"""vmckpt host: list, add, set, rm, calibrate.

`images` is in images.py, `check` is in checks.py.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.nouns.host import checks, images
from vmckpt.cli.nouns.host.checks import host_facts
from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, run, show
from vmckpt.ui.shown import one_line

if TYPE_CHECKING:
    from vmckpt.forecast.model.link import LinkModel
    from vmckpt.hosts.local import LocalHost
    from vmckpt.hosts.ssh.address import Address
    from vmckpt.hosts.ssh.entry import SshEntry
    from vmckpt.hosts.uids import Uids
    from vmckpt.migrate.calibrate import Calibration

HostName = Annotated[str, typer.Argument(help="The host's name.", metavar="HOST")]
Bridge = Annotated[
    str | None,
    typer.Option("--bridge", help="Bridge for guests' NICs; or none.", metavar="BRIDGE"),
]
_QEMU = typer.Option("--qemu", help="QEMU binary on the host.", metavar="FILE")
MigrationAddress = Annotated[
    str | None,
    typer.Option(
        "--migration-addr",
        help="Address for incoming migrations. [initially: the SSH address]",
        metavar="ADDRESS",
    ),
]
SecondAddress = Annotated[
    str | None,
    typer.Option(
        "--second-addr",
        help="Second address, on another network; or none. [initially: the SSH address]",
        metavar="ADDRESS",
    ),
]
MigrationPorts = Annotated[
    str | None,
    typer.Option("--migration-ports", help="Ports for incoming migrations.", metavar="A-B"),
]
Libvirt = Annotated[
    str | None,
    typer.Option(
        "--libvirt",
        help="Socket of the host's libvirtd, e.g. /run/libvirt/libvirt-sock; or none.",
        metavar="SOCKET",
    ),
]
VmUids = Annotated[
    str | None,
    typer.Option(
        "--vm-uids",
        help="Run each VM's QEMU as a user of its own, from this range of unused uids; or none. "
        "Takes effect when a VM next starts.",
        metavar="FIRST-LAST",
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="State directory on the host. [default: vmckpt's default there]",
        metavar="DIRECTORY",
    ),
]
SshConfig = Annotated[
    Path | None,
    typer.Option(
        "--ssh-config", help="SSH configuration file. [default: ~/.ssh/config]", metavar="FILE"
    ),
]

_NONE = (None, "", "none")

app = typer.Typer(help="The inventory of hosts.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
@together
def list_(listing: ListOptions) -> None:
    """List the hosts, without contacting them."""
    from vmckpt.hosts.inventory.inventory import all_entries

    hosts = [host_facts(entry) | {"address": _address(entry)} for entry in all_entries()]
    columns = ("name", "address", "migration_address", "second_address", "qemu", "state_dir")
    shown = [host | {"address": host["address"] or "this machine"} for host in hosts]
    rows = [tuple(host[column] or "-" for column in columns) for host in shown]
    header = ("name", "address", "migration address", "second address", "qemu", "state directory")
    listing.layout().show({"hosts": hosts}, header, rows, wide=header[3:])


def _address(entry: "LocalHost | SshEntry") -> str | None:
    """Where SSH finds it; None for this machine and parts of it."""
    from vmckpt.hosts.local import LocalHost

    return None if isinstance(entry, LocalHost) else str(entry.address)


@app.command()
def add(
    name: HostName,
    address: Annotated[
        str, typer.Argument(help="ssh://USER@HOST:PORT, or a Host of ~/.ssh/config.")
    ],
    migration_addr: MigrationAddress = None,
    second_addr: SecondAddress = None,
    state_dir: StateDir = None,
    qemu: Annotated[str, _QEMU] = "qemu-system-x86_64",
    bridge: Bridge = None,
    migration_ports: MigrationPorts = None,
    libvirt: Libvirt = None,
    vm_uids: VmUids = None,
    vmckpt: Annotated[
        str, typer.Option(help="vmckpt command on the host.", metavar="FILE")
    ] = "vmckpt",
    ssh_config: SshConfig = None,
    json: Json = False,
) -> None:
    """Add a host over SSH.

    It must be reachable; problems are shown.
    """
    from vmckpt.hosts.inventory.inventory import add_host, describing, greet, require_new_name
    from vmckpt.hosts.ssh.address import Address
    from vmckpt.hosts.ssh.entry import SshEntry
    from vmckpt.preflight.host.entry import require_usable

    require_new_name(name)
    where = Address.parse(address, ssh_config.absolute() if ssh_config else None)
    greeting = run(greet(name, where, vmckpt, state_dir))
    migration_address = migration_addr or greeting.address or where.host
    with describing(name):
        entry = SshEntry(
            name,
            greeting.state_dir,
            migration_address,
            qemu=qemu,
            bridge=_unless_none(bridge),
            migration_ports=_ports(migration_ports),
            libvirt=_libvirt(libvirt),
            second_address=_unless_none(second_addr)
            if second_addr is not None
            else _other_network(greeting.address, migration_address),
            vm_uids=_uids(vm_uids),
            address=where,
            vmckpt=vmckpt,
        )
    run(require_usable(entry, ("vm_uids", "address")))
    add_host(entry)
    text = f"{name} is added; see what it lacks: vmckpt host check {name}"
    show(host_facts(entry), text, as_json=json)


@app.command("set")
def set_(
    name: HostName,
    address: Annotated[
        str | None, typer.Option(help="ssh://USER@HOST:PORT; must be reachable.", metavar="ADDRESS")
    ] = None,
    migration_addr: MigrationAddress = None,
    second_addr: SecondAddress = None,
    qemu: Annotated[str | None, _QEMU] = None,
    bridge: Bridge = None,
    migration_ports: MigrationPorts = None,
    libvirt: Libvirt = None,
    vm_uids: VmUids = None,
    json: Json = False,
) -> None:
    """Change a host's inventory entry.

    Nothing on the host changes.
    """
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory.inventory import change_host, describing, find_entry
    from vmckpt.preflight.host.entry import require_usable

    entry = find_entry(name)
    requested: dict[str, Any] = {
        "address": _moved(entry, address) if address is not None else None,
        "migration_address": migration_addr,
        "qemu": qemu,
        "migration_ports": _ports(migration_ports),
    }
    changes = {field: value for field, value in requested.items() if value is not None}
    if bridge is not None:
        changes["bridge"] = _unless_none(bridge)
    if second_addr is not None:
        changes["second_address"] = _unless_none(second_addr)
    if libvirt is not None:
        changes["libvirt"] = _libvirt(libvirt)
    if vm_uids is not None:
        changes["vm_uids"] = _uids(vm_uids)
    if not changes:
        raise UsageError(
            f"nothing of '{name}' is to be changed",
            why="no option is given",
            remedy=f"e.g. vmckpt host set {name} --bridge br0",
        )
    with describing(name):
        changed = replace(entry, **changes)
    run(require_usable(changed, changes))
    change_host(changed)
    show(host_facts(changed), f"{name} is changed: {', '.join(changes)}", as_json=json)


def _moved(entry: "LocalHost | SshEntry", text: str) -> "Address":
    """Another address, at which the host answers. Raises UsageError, HostDownError."""
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory.inventory import greet
    from vmckpt.hosts.ssh.address import Address
    from vmckpt.hosts.ssh.entry import SshEntry

    if not isinstance(entry, SshEntry):
        raise UsageError(
            f"'{entry.name}' has no address",
            why="it is this machine, or a part of it",
            remedy=f"add one that SSH reaches: vmckpt host add NAME {text}",
        )
    where = Address.parse(text, entry.address.config)
    run(greet(entry.name, where, entry.vmckpt, entry.state_dir))
    return where


def _libvirt(text: str | None) -> Path | None:
    return None if text in _NONE else Path(text)


def _uids(text: str | None) -> "Uids | None":
    from vmckpt.errors import UsageError
    from vmckpt.hosts.uids import parse_uids

    if text in _NONE:
        return None
    try:
        return parse_uids(text)
    except ValueError as exc:
        raise UsageError(
            f"'{text}' are not uids for VMs",
            why=str(exc),
            remedy="write FIRST-LAST, e.g. --vm-uids 2000000000-2099999999, or none",
        ) from exc


def _unless_none(text: str | None) -> str | None:
    return None if text == "none" else text


def _other_network(came_in_on: str | None, migration_address: str) -> str | None:
    """Where SSH comes in, if that is another address and not this machine's alone."""
    from ipaddress import ip_address

    if came_in_on in (None, migration_address) or ip_address(came_in_on).is_loopback:
        return None
    return came_in_on


def _ports(text: str | None) -> tuple[int, int] | None:
    from vmckpt.errors import UsageError
    from vmckpt.units import whole_number

    if text is None:
        return None
    first, last = (whole_number(port, 65535) for port in text.partition("-")[::2])
    if first is not None and last is not None and 0 < first <= last:
        return first, last
    raise UsageError(
        f"'{text}' is not a range of ports", why="it must be FIRST-LAST", remedy="e.g. 49152-49215"
    )


@app.command()
def rm(name: HostName, json: Json = False) -> None:
    """Remove a host from the inventory.

    Nothing on the host changes.
    """
    from vmckpt.checkpoint.catalogue.known_stores import forget_of_host
    from vmckpt.hosts.inventory.inventory import remove_host

    remove_host(name)
    forget_of_host(name)
    show({"name": name, "removed": True}, f"{name} is no longer in the inventory", as_json=json)


@app.command()
def calibrate(
    first: Annotated[str, typer.Argument(help="First host.", metavar="HOST")],
    second: Annotated[str, typer.Argument(help="Second host.", metavar="HOST")],
    size: Annotated[
        str, typer.Option(help="Memory size of the test guest.", metavar="SIZE")
    ] = "256M",
    json: Json = False,
) -> None:
    """Measure the cost of migrations between two hosts.

    Migrates a small test guest back and forth.
    """
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.migrate.calibrate import LEAST_BYTES, calibrate
    from vmckpt.ui.progress import display
    from vmckpt.units import format_size, parse_size_bytes

    memory_bytes = parse_size_bytes(size)
    if memory_bytes < LEAST_BYTES or memory_bytes % (1 << 20):
        raise UsageError(
            f"--size {size} is not a size to calibrate with",
            why=f"it must be whole MiB, at least {format_size(LEAST_BYTES)}",
            remedy="write e.g. --size 256M",
        )

    async def work() -> "Calibration":
        with display(f"calibrating {first} and {second}") as emit:
            return await calibrate(find_host(first), find_host(second), memory_bytes, emit)

    done = run(work())
    directions = [(first, second, done.there), (second, first, done.back)]
    facts = [
        {"source": source, "target": destination, "sending": kind, **asdict(link)}
        for source, destination, links in directions
        for kind, link in links.items()
    ]
    result = {"moves": done.moves, "skipped": list(done.skipped), "links": facts}
    show(result, _links(directions, done.skipped), as_json=json)


def _links(
    directions: "list[tuple[str, str, dict[str, LinkModel]]]", skipped: "tuple[str, ...]"
) -> str:
    from vmckpt.ui.tables import table
    from vmckpt.units import format_duration, format_rate

    rows = [
        (
            f"{source} -> {destination}",
            kind,
            format_rate(link.bytes_per_s),
            format_duration(link.costs.zero_page_s),
            format_duration(link.fixed_s),
            format_duration(link.switch_s),
            f"{link.spread:.0%}",
            str(link.moves),
        )
        for source, destination, links in directions
        for kind, link in links.items()
    ]
    header = ("hosts", "sent", "pages", "a zero page", "fixed", "switch", "spread", "moves")
    return "\n".join(
        [table(header, rows), *(f"left out: {one_line(reason)}" for reason in skipped)]
    )


app.command()(images.images)
app.command()(checks.check)
