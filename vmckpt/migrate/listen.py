"""Where a migration comes in: the target's address, on a port of the range its host allows."""

from vmckpt.errors import OperationFailedError
from vmckpt.hosts.host import Host
from vmckpt.migrate.transfer import wait_for_setup
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor


async def listen(target: Monitor, host: Host) -> str:
    """Have the waiting QEMU listen, on the first free port; the URI that the source connects to.

    Raises OperationFailedError, naming the range when all of its ports are taken.
    """
    first, last = host.migration_ports or (0, 0)
    address = host.migration_address
    # An IPv6 address has colons of its own.
    place = f"tcp:[{address}]" if ":" in address else f"tcp:{address}"
    try:
        # QEMU itself tries one port after the other up to "to".
        await commands.migrate_incoming(target, f"{place}:{first},to={last}")
        port = await wait_for_setup(target)
    except CommandRefusedError as exc:
        raise OperationFailedError(
            f"{host.name} cannot receive a migration at {address}",
            why=f"no port from {first} to {last} can be had: {exc.description}"
            if first
            else exc.description,
            remedy=f"wait for other migrations to {host.name} to end, or widen migration_ports in "
            "its inventory entry"
            if first
            else "check that the target's migration address is one of its own",
        ) from exc
    return f"{place}:{port}"
