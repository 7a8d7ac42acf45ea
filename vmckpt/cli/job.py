"""vmckpt job: what another vmckpt starts on the source of a migration between two hosts.

It imports no typer: a migration waits for it.
"""

from vmckpt.cli.loop import run


def job(name: str, recover: bool = False) -> None:
    """Do the migration RUN that was written down here; people have no use for it."""
    from vmckpt.hosts.inventory import check_name, local_host, state_dir
    from vmckpt.migrate.job import await_job, read_job, recover_job, run_job

    check_name(name, "run")
    if recover:
        run(recover_job(read_job(state_dir(), name)))
    else:
        found = run(await_job(state_dir(), name))
        run(run_job(found, run(local_host().own_command())))
