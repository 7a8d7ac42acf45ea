"""The operator's side of checkpoints of libvirt domains."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from vmckpt.checkpoint.catalogue.location import access_to
from vmckpt.checkpoint.domains.settle import require_running
from vmckpt.checkpoint.facts import EPOCH
from vmckpt.checkpoint.jobs import CHECKPOINT, StoreRequest, Take
from vmckpt.checkpoint.meant import require_meant
from vmckpt.checkpoint.operate import StoreJob, have_done, store_of
from vmckpt.checkpoint.origin import run_key
from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
from vmckpt.errors import RefusedError
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.preflight.domains.capture import described
from vmckpt.preflight.finding import require
from vmckpt.sequence.in_thread import in_thread
from vmckpt.store.sealing.keys import KeySource
from vmckpt.vm.domains.definition.parts import parts_of
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.monitor import TAINTED


async def create(
    domain: Domain,
    given: str | None,
    options: TakeOptions,
    tell: Callable[[str], None],
    key: KeySource | None = None,
) -> TakenCheckpoint:
    """Take a checkpoint of the domain, on its host. Raises as `take.take_domain`."""
    work = await taking(domain, given, options, key)
    tell(TAINTED)
    return await have_done(work, tell)


async def taking(
    domain: Domain, given: str | None, options: TakeOptions, key: KeySource | None = None
) -> StoreJob[Take, TakenCheckpoint]:
    """The job that takes a checkpoint. Raises RefusedError, NotFoundError, HostDownError."""
    name, host = domain.name, domain.host
    if options.kind != EPOCH:
        raise RefusedError(
            f"'{name}' cannot have checkpoints of --kind {options.kind}",
            why="it is a libvirt domain, whose QEMU writes such a file for libvirt only",
            remedy="leave out --kind; or, paused, into its image: --kind internal",
        )
    require_running(domain)
    # Its host reports whatever else it finds as the job's error.
    found = described(name, domain.description.memory_bytes, parts_of(domain.seen.xml))
    require(found, f"'{name}' cannot have checkpoints while it runs")
    location = store_of(name, host, given)
    access = await access_to(location, key, to_write=True, named=given is not None)
    if access.secret is not None:
        await require_meant(name, host, domain.uuid, location, key)
    site_key = await in_thread(partial(run_key, state_dir(), name))
    options = replace(options, site_key=site_key)

    def request(store: StoreRequest, held_s: float | None) -> Take:
        return Take(store, options, held_s, domain.uuid)

    return StoreJob(CHECKPOINT, host, name, request, location, access)
