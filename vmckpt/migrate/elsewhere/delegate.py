"""The operator's side of a migration between two other hosts: started there, watched here.

The source host does the work. If this side loses its connection, for a while or for good, the
migration still ends, and all its events can be read from the beginning
(`migrate/elsewhere/watch.py`).
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vmckpt.errors import VmckptError
from vmckpt.events.record import RunRecord
from vmckpt.events.types import Emit
from vmckpt.hosts.host import Host, HostEntry, entry_fields
from vmckpt.hosts.inventory.directories import runs_dir
from vmckpt.hosts.remote.tls import have_listen
from vmckpt.jobs.files import JobFiles, new_run
from vmckpt.jobs.handle import attach, begin
from vmckpt.migrate.elsewhere.job import MIGRATE, MigrationRequest
from vmckpt.migrate.elsewhere.watch import JOB_ON, watch
from vmckpt.migrate.outcome.recover import Recovery
from vmckpt.migrate.recorded import request_of
from vmckpt.migrate.report import MigrationReport
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.finding import require
from vmckpt.preflight.migration.method import domain_checks
from vmckpt.sequence.steps import both, finish
from vmckpt.vm.inventory import Vm


async def migrate_there(
    vm: Vm,
    destination: Host,
    options: MigrationOptions,
    emit: Emit,
    forecast: Mapping[str, Any] | None = None,
) -> MigrationReport | Recovery:
    """Have the VM's host move it to `destination`, neither being this machine; watch it to its end.

    Raises and returns as `watch` does; RefusedError for options that only domains can have: XML,
    which may hold passwords, is not sent to a host without need.
    """
    require(domain_checks(options), f"'{vm.name}' cannot migrate to {destination.name}")
    run, source = new_run(), vm.host
    there = JobFiles.of(destination.state_dir, MIGRATE.name, run).path
    job = attach(MIGRATE, source, run)
    try:
        # Both processes start slowly: the job waits for its request.
        job, link = await both(begin(MIGRATE, source, run), have_listen(destination, there))
    except BaseException:
        await finish(both(_remove(destination, there), _remove(source, job.files.path)))
        raise
    try:
        request = request_of(vm.name, (vm.host, destination), options) | {JOB_ON: source.name}
        RunRecord(run, "migrate", request, forecast=forecast).save(runs_dir())
        there_entry = HostEntry(**entry_fields(destination))
        await job.give(vm.name, MigrationRequest(there_entry, options, link, forecast))
    except BaseException:
        # The listener ends without its directory, and a running job needs it: end the job first.
        await finish(job.withdraw(f"the migration of '{vm.name}'"))
        await finish(_remove(destination, there))
        raise
    return await watch(job, emit)


async def _remove(host: Host, path: Path) -> None:
    # The earlier error says more; a remaining process ends by itself without a client.
    with suppress(VmckptError):
        await host.remove(path)
