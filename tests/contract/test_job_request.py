"""A job's process is started before its request is written."""

import asyncio
from pathlib import Path

import pytest

from vmckpt.errors import NotFoundError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote.tls import Place
from vmckpt.migrate.job import REQUEST, Job, JobDir, await_job
from vmckpt.options.migration import Options


def a_job(state_dir: Path) -> Job:
    source = LocalHost("a", state_dir, "127.0.0.1")
    target = LocalHost("b", state_dir / "b", "127.0.0.1")
    return Job("20261122-1", "mover", source, target, Options(), Place("127.0.0.1", 1, "f", "t"))


def test_a_request_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    files = JobDir.of(tmp_path, job.run)
    files.path.mkdir(parents=True)

    async def late() -> Job:
        waiting = asyncio.create_task(await_job(tmp_path, job.run))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        await job.source.write_text(files.request, REQUEST.encode(job.request))
        return await waiting

    assert asyncio.run(late()).request == job.request


def test_a_job_whose_directory_goes_ends(tmp_path: Path) -> None:
    files = JobDir.of(tmp_path, "20261122-1")
    files.path.mkdir(parents=True)

    async def goes() -> None:
        waiting = asyncio.create_task(await_job(tmp_path, "20261122-1"))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        files.path.rmdir()
        async with asyncio.timeout(10):
            await waiting

    with pytest.raises(NotFoundError):
        asyncio.run(goes())
