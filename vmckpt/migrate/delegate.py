"""The operator's side of a migration between two hosts elsewhere: begun there, watched from here.

The work is the source host's. This side may lose its connection, come back, or not: the migration
ends either way, and what it told can be read from the beginning (`migrate/watch.py`).
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vmckpt.errors import OutcomeUnknownError, VmckptError
from vmckpt.events.record import RunRecord
from vmckpt.events.types import Emit
from vmckpt.hosts.host import Host, entry_fields
from vmckpt.hosts.inventory import runs_dir
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.process import ProcessId
from vmckpt.hosts.remote.tls import have_listen
from vmckpt.migrate.job import REQUEST, Job, JobDir
from vmckpt.migrate.recorded import new_run, request_of
from vmckpt.migrate.recover import Recovery
from vmckpt.migrate.report import Report
from vmckpt.migrate.watch import JOB_ON, watch
from vmckpt.options.migration import Options
from vmckpt.preflight.finding import require
from vmckpt.preflight.migration.method import domain_checks
from vmckpt.sequence.steps import both, finish
from vmckpt.state.documents import save_to
from vmckpt.vm.inventory import Vm


async def migrate_there(
    vm: Vm,
    target: Host,
    options: Options,
    emit: Emit,
    forecast: Mapping[str, Any] | None = None,
) -> Report | Recovery:
    """Have the VM's host move it to `target`, both being elsewhere; watch it to its end.

    Raises and returns what `watch` does; RefusedError for what only domains can have: XML, which
    may hold passwords, goes to no host for nothing.
    """
    require(domain_checks(options), f"'{vm.name}' cannot migrate to {target.name}")
    run, source = new_run(), vm.host
    files, there = JobDir.of(source.state_dir, run), JobDir.of(target.state_dir, run).path
    try:
        # Both processes take their time to start: the job waits for its request.
        begun, link = await both(_begin(source, run, files), have_listen(target, there))
    except BaseException:
        await finish(both(_remove(target, there), _remove(source, files.path)))
        raise
    try:
        itself = LocalHost(**entry_fields(source))
        job = Job(run, vm.name, itself, target, options, link, forecast)
        request = request_of(vm.name, (vm.host, target), options) | {JOB_ON: source.name}
        RunRecord(run, "migrate", request, forecast=forecast).save(runs_dir())
        await save_to(source, files.request, REQUEST, job.request)
    except BaseException as exc:
        # Without its directory the listener ends; a job that began after all finds nobody there.
        await finish(_remove(target, there))
        # A cancellation may have come after the request: the job needs its files to say so.
        if isinstance(exc, Exception):
            await finish(_remove(source, files.path))
        raise
    return await watch(source, run, emit, begun)


async def _begin(source: Host, run: str, files: JobDir) -> ProcessId | None:
    """Start the job's process, which ends when its directory is removed, or nothing comes.

    None when the connection broke: whether it has begun is to be seen there.
    """
    await source.make_dir(files.path)
    command = [*await source.own_command(), "job", run]
    try:
        return await source.spawn(command, files.log)
    except OutcomeUnknownError:
        return None


async def _remove(host: Host, path: Path) -> None:
    # What failed before says more; a process that is left ends by itself when nobody comes.
    with suppress(VmckptError):
        await host.remove(path)
