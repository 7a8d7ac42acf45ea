"""The request to libvirt: flags and typed parameters of virDomainMigrateToURI3."""

from functools import reduce
from operator import or_
from typing import NamedTuple

from vmckpt.hosts.sockets.uri import in_uri
from vmckpt.migrate.domains import hold
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.preflight.domains.checks import Contents, Route
from vmckpt.preflight.domains.options import whole_mib
from vmckpt.vm.domains.flags import MigrateFlag

Parameter = str | int | list[str]


class MigrateCall(NamedTuple):
    """One call of virDomainMigrateToURI3."""

    to_libvirtd: str
    parameters: dict[str, Parameter]
    flags: MigrateFlag


def build(
    options: MigrationOptions, route: Route, contents: Contents, held_mib_per_s: int = 0
) -> MigrateCall:
    """The call for these options, with "auto" already resolved. Pure.

    `held_mib_per_s`: see hold.py; 0: QEMU uses its own measurement.
    """
    there = options.at_target
    reply: dict[str, Parameter | None] = {
        "migrate_uri": _uri(route.address, route.memory_port),
        "bandwidth": _mib_or_none(options.bandwidth_bytes_per_s),
        "bandwidth.postcopy": _mib_or_none(options.postcopy_bandwidth_bytes_per_s),
        hold.PARAMETER: held_mib_per_s or None,
        "parallel.connections": options.requested_channels,
        "auto_converge.initial": options.throttle_initial_percent,
        "auto_converge.increment": options.throttle_increment_percent,
        "compression": [options.compression] if options.compression else None,
        f"compression.{options.compression}.level": options.compression_level,
        "compression.xbzrle.cache": options.xbzrle_cache_bytes,
        "tls.destination": options.tls_name,
        "destination_name": there.name if there else None,
        "destination_xml": there.xml if there else None,
        "persistent_xml": there.persistent_xml if there else None,
        "graphics_uri": there.graphics_uri if there else None,
        **_disks(route, contents),
    }
    parameters = {name: value for name, value in reply.items() if value is not None}
    return MigrateCall(route.to_libvirtd, parameters, _flags(options, contents))


def _flags(options: MigrationOptions, contents: Contents) -> MigrateFlag:
    wanted = {
        MigrateFlag.PEER2PEER: True,
        MigrateFlag.LIVE: not (options.offline or options.method is Method.STOP),
        MigrateFlag.OFFLINE: options.offline,
        MigrateFlag.PERSIST_DEST | MigrateFlag.UNDEFINE_SOURCE: contents.persistent,
        MigrateFlag.POSTCOPY: options.may_postcopy,
        MigrateFlag.AUTO_CONVERGE: options.auto_converge,
        MigrateFlag.PARALLEL: options.requested_channels is not None,
        MigrateFlag.COMPRESSED: options.compression is not None,
        MigrateFlag.ZEROCOPY: options.zero_copy,
        MigrateFlag.ABORT_ON_ERROR: options.abort_on_error,
        MigrateFlag.TLS: contents.encrypted,
        MigrateFlag.UNSAFE: contents.proved_shared,
        MigrateFlag.NON_SHARED_DISK: bool(contents.copied_disks),
        MigrateFlag.NON_SHARED_SYNCHRONOUS_WRITES: bool(contents.copied_disks)
        and options.synchronous_writes,
    }
    return reduce(or_, (flag for flag, on in wanted.items() if on))


def _disks(route: Route, contents: Contents) -> dict[str, Parameter]:
    if not contents.copied_disks:
        return {}
    names = list(contents.copied_disks)
    zeroes: dict[str, Parameter] = {"migrate_disks_detect_zeroes": names}
    return {
        "migrate_disks": names,
        "disks_uri": _uri(route.address, route.disks_port),
        # To keep sparse images sparse.
        **(zeroes if contents.detects_zeroes else {}),
    }


def unheld(request: MigrateCall) -> MigrateCall:
    """The same call for a QEMU that cannot be held back. Pure."""
    parameters = {k: v for k, v in request.parameters.items() if k != hold.PARAMETER}
    return request._replace(parameters=parameters)


def _mib_or_none(bandwidth_bytes_per_s: int) -> int | None:
    return whole_mib(bandwidth_bytes_per_s) if bandwidth_bytes_per_s else None


def _uri(address: str, port: int | None) -> str:
    host = in_uri(address)
    return f"tcp://{host}" if port is None else f"tcp://{host}:{port}"
