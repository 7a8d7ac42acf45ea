"""Which checkpoint a command means, what opens its store, and where it is restored."""

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vmckpt.cli.output import run

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue import Catalogue, Entry
    from vmckpt.hosts.host import Host
    from vmckpt.store.sealing.keys import KeySource

StorePlace = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="A directory, HOST:, HOST:/DIRECTORY, ssh://... or s3://...; else wherever there are "
        "any, and for a new one the host's own.",
    ),
]
KeyFile = Annotated[
    str | None, typer.Option("--key-file", help="An encrypted store: a file with its key.")
]
KeyCommand = Annotated[
    str | None, typer.Option("--key-command", help="An encrypted store: what prints its key.")
]


class Stored(NamedTuple):
    """The store that is meant, and what opens it."""

    store: StorePlace = None
    key_file: KeyFile = None
    key_command: KeyCommand = None

    def key_source(self) -> "KeySource | None":
        """Where its key is had; see `key_source`."""
        return key_source(self.key_file, self.key_command)


def catalogue(store: str | None, key: "KeySource | None", vm: str | None = None) -> "Catalogue":
    """All checkpoints, or one VM's, in the store that was named, else wherever there are any."""
    from vmckpt.checkpoint import catalogue as catalogues
    from vmckpt.fleet.guard.pinned import without_stale
    from vmckpt.hosts.inventory import all_hosts

    return run(without_stale(run(catalogues.catalogue(all_hosts(), store, key, vm)), key))


def find(point: str, store: str | None, key: "KeySource | None") -> "Entry":
    """The checkpoint of that name, or whose id begins so. Raises NotFoundError, UsageError."""
    return catalogue(store, key).find(point)


async def identities(vm: str) -> "list[str | None]":
    """The ids of the VMs of that name in the inventory; None: it has none yet."""
    from vmckpt.hosts.every import ask_every
    from vmckpt.hosts.inventory import all_hosts
    from vmckpt.vm.identity import read_identity
    from vmckpt.vm.paths import vm_dir

    async def ask(host: "Host") -> "list[str | None]":
        directory = vm_dir(host.state_dir, vm)
        there = await host.exists(directory.current)
        return [await read_identity(host, directory)] if there else []

    answers = await ask_every(all_hosts(), ask)
    return [one for those in answers.given for one in those]


def key_source(key_file: str | None, key_command: str | None) -> "KeySource | None":
    """Where an encrypted store's key is had, by options; None: the environment's, or the agent's.

    Raises UsageError.
    """
    if key_file is None and key_command is None:
        return None
    from vmckpt.cli.store import key_of

    return key_of(key_file, key_command)


async def home(entry: "Entry", given: str | None, *, copy: bool) -> "Host":
    """Where a checkpoint is restored: on the host that was named; a copy where the checkpoint was
    taken; the VM itself where that is now. Raises NotFoundError; OutcomeUnknownError: it is at home
    on two hosts.
    """
    from vmckpt.cli.found import find_own
    from vmckpt.hosts.every import ask_every
    from vmckpt.hosts.inventory import all_hosts, find_host
    from vmckpt.vm.inventory import read_vm

    if given is not None:
        return find_host(given)
    if not copy:
        vms = await ask_every(all_hosts(), lambda one: read_vm(one, entry.manifest.vm))
        found = [vm.host for vm in vms.given if vm is not None]
        if len(found) > 1:
            return (await find_own(entry.manifest.vm)).host
        if found:
            return found[0]
    return find_host(entry.facts.host if entry.facts else "local")
