"""What libvirt is asked for: the flags and typed parameters of virDomainMigrateToURI3."""

from typing import NamedTuple

from vmckpt.hosts.uri import in_uri
from vmckpt.migrate.domains import hold
from vmckpt.migrate.options import DEFAULT_CHANNELS, Method, Options
from vmckpt.units import MIB
from vmckpt.vm.domains.flags import MigrateFlag

Parameter = str | int | list[str]


class Request(NamedTuple):
    """One call of virDomainMigrateToURI3."""

    to_libvirtd: str
    parameters: dict[str, Parameter]
    flags: MigrateFlag


class Route(NamedTuple):
    """Where things go: the target's libvirtd, its migration address, and its ports.

    A port of None is libvirt's choice, in its own range.
    """

    to_libvirtd: str
    address: str
    memory_port: int | None = None
    disks_port: int | None = None


class Cargo(NamedTuple):
    """What moves. `copied_disks` are names of disks in the domain (vda).

    `proved_shared`: vmckpt has seen that both hosts have the other disks, which libvirt believes of
    some kinds of file systems only.
    """

    persistent: bool
    copied_disks: tuple[str, ...]
    proved_shared: bool
    encrypted: bool


def build(options: Options, route: Route, cargo: Cargo, held_mib_per_s: int = 0) -> Request:
    """The call for these options; "auto" has been replaced by what it comes to. Pure.

    `held_mib_per_s`: see hold.py; 0: QEMU goes by its own measure.
    """
    flags = MigrateFlag.PEER2PEER
    parameters: dict[str, Parameter] = {"migrate_uri": _uri(route.address, route.memory_port)}
    if options.method is not Method.STOP:
        flags |= MigrateFlag.LIVE
    if cargo.persistent:
        flags |= MigrateFlag.PERSIST_DEST | MigrateFlag.UNDEFINE_SOURCE
    if options.may_postcopy:
        flags |= MigrateFlag.POSTCOPY
    if options.auto_converge:
        flags |= MigrateFlag.AUTO_CONVERGE
    if cargo.encrypted:
        flags |= MigrateFlag.TLS
    if cargo.proved_shared:
        flags |= MigrateFlag.UNSAFE
    if cargo.copied_disks:
        flags |= MigrateFlag.NON_SHARED_DISK
        parameters["migrate_disks"] = list(cargo.copied_disks)
        parameters["disks_uri"] = _uri(route.address, route.disks_port)
    if options.bandwidth_bytes_per_s:
        parameters["bandwidth"] = bandwidth_mib_per_s(options)
    if held_mib_per_s:
        parameters[hold.PARAMETER] = held_mib_per_s
    channels = options.channels or (DEFAULT_CHANNELS if options.compression else None)
    if channels:
        flags |= MigrateFlag.PARALLEL
        parameters["parallel.connections"] = channels
    if options.compression:
        flags |= MigrateFlag.COMPRESSED
        parameters["compression"] = [options.compression]
    return Request(route.to_libvirtd, parameters, flags)


def unheld(request: Request) -> Request:
    """The same for a QEMU that cannot be held back. Pure."""
    parameters = {k: v for k, v in request.parameters.items() if k != hold.PARAMETER}
    return request._replace(parameters=parameters)


def bandwidth_mib_per_s(options: Options) -> int:
    """Libvirt counts in whole MiB/s: at most what was asked for, but 1 at least."""
    return whole_mib(options.bandwidth_bytes_per_s)


def whole_mib(bandwidth_bytes_per_s: int) -> int:
    """Whole MiB in it, but 1 at least."""
    return max(1, bandwidth_bytes_per_s // MIB)


def _uri(address: str, port: int | None) -> str:
    host = in_uri(address)
    return f"tcp://{host}" if port is None else f"tcp://{host}:{port}"
