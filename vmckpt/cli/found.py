"""The VM that a command names; recoveries of interrupted operations are reported on stderr.

It does not import typer: a plain `vmckpt migrate VM HOST` does without (`entry.py`).
"""

from typing import TYPE_CHECKING

from vmckpt.cli.loop import at_end, warn

if TYPE_CHECKING:
    from vmckpt.drivers.domain import OwnOnly
    from vmckpt.drivers.driver import Driver
    from vmckpt.vm.domains.inventory import Domain
    from vmckpt.vm.inventory import Vm


async def find(name: str) -> "Driver":
    """See `drivers.find`."""
    from vmckpt.drivers.find import find

    keep_sessions()
    return await find(name, warn)


async def find_own(name: str, use: "OwnOnly") -> "Vm":
    """See `drivers.find`."""
    from vmckpt.drivers.find import find_own

    keep_sessions()
    return await find_own(name, warn, use)


async def find_domain(name: str) -> "Domain":
    """See `drivers.find`."""
    from vmckpt.drivers.find import find_domain

    keep_sessions()
    return await find_domain(name, warn)


def keep_sessions() -> None:
    """Sessions with libvirtds last as long as the command: each search and act would open one."""
    from vmckpt.hosts.inventory.inventory import all_hosts

    if any(host.libvirt is not None for host in all_hosts()):
        from vmckpt.vm.domains.sessions import close_sessions, keep_sessions

        keep_sessions()
        at_end(close_sessions)
