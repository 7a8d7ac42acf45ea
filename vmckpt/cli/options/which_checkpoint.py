"""Which checkpoint a command means, and where it is restored."""

from typing import TYPE_CHECKING

from vmckpt.cli.output import run, warn

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.catalogue import Catalogue, CatalogueEntry
    from vmckpt.hosts.host import Host
    from vmckpt.store.sealing.keys import KeySource


def catalogue(store: str | None, key: "KeySource | None", vm: str | None = None) -> "Catalogue":
    """All checkpoints, or one VM's, in the store that was named, else wherever there are any."""
    from vmckpt.checkpoint.catalogue import catalogue as catalogues
    from vmckpt.fleet.guard.pinned import without_stale
    from vmckpt.hosts.inventory.inventory import all_hosts

    return run(without_stale(run(catalogues.catalogue(all_hosts(), store, key, vm)), key))


def find(point: str, store: str | None, key: "KeySource | None") -> "CatalogueEntry":
    """The checkpoint of that name, or whose id begins so. Raises NotFoundError, UsageError."""
    return catalogue(store, key).find(point)


async def home(entry: "CatalogueEntry", given: str | None, *, copy: bool) -> "Host":
    """The host that was named, else see `drivers.find`. Raises NotFoundError too.

    RefusedError: a standby may run the VM that is to be replaced there.
    """
    from vmckpt.drivers.find import require_decided_on, restores_on
    from vmckpt.hosts.inventory.inventory import find_host

    host = find_host(given) if given is not None else await restores_on(entry, warn, copy=copy)
    if not copy:
        await require_decided_on(host, entry.manifest.vm)
    return host
