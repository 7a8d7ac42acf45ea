"""Listen for a migration: at the destination's address, on a port of its host's range."""

from vmckpt.deadlines import poll
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.sockets.uri import in_uri
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.sequence.steps import both

SETUP_TIMEOUT_S = 5.0


async def listen(destination: Monitor, host: Host) -> int:
    """Have the waiting QEMU listen on the first free port; returns that port.

    Raises OperationFailedError, naming the range, if all of its ports are taken.
    """
    first, last = host.migration_ports or (0, 0)
    try:
        # QEMU itself tries the ports in order up to "to".
        _, port = await both(
            commands.migrate_incoming(destination, f"{uri(host, first)},to={last}"),
            _port(destination),
        )
    except CommandRefusedError as exc:
        if not first:
            why, remedy = exc.description, "check that its migration address is one of its own"
        else:
            why = f"no port from {first} to {last} can be had: {exc.description}"
            remedy = "let other migrations to it end, or widen migration_ports in its inventory"
        raise OperationFailedError(
            f"{host.name} cannot receive a migration at {host.migration_address}",
            why=why,
            remedy=remedy,
        ) from exc
    return port


def uri(host: Host, port: int) -> str:
    """QEMU's name for a port of the host's migration address."""
    return f"tcp:{in_uri(host.migration_address)}:{port}"


async def _port(destination: Monitor) -> int:
    """The port it listens on, once `migrate-incoming` has taken effect."""
    status = await poll(
        lambda: commands.query_migrate(destination),
        lambda status: status.port is not None,
        every_s=0.005,
        within_s=SETUP_TIMEOUT_S,
    )
    if status.port is None:
        raise OperationFailedError(
            "the destination does not listen",
            why=status.error or f"no port within {SETUP_TIMEOUT_S:g} s",
            remedy="check that the destination's migration address is one of its own",
        )
    return status.port
