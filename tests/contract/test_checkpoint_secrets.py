"""What opens an encrypted store stays in a host's memory no longer than someone may need it."""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.job_examples import EXAMPLES
from vmckpt.checkpoint.jobs import KINDS, RECOVER
from vmckpt.checkpoint.secret import forget_old_secrets, taken_from, written_on
from vmckpt.errors import StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.jobs.handle import attach
from vmckpt.jobs.kind import JobKind
from vmckpt.jobs.serve import recover, serve
from vmckpt.vm.paths import IN_MEMORY


@pytest.fixture
def left() -> Iterator[Path]:
    """A secret that no one has taken."""
    path = Path(f"/dev/shm/vmckpt-key-test-{os.getpid()}")
    path.write_text("00ff")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("is_revoked", [False, True])
@pytest.mark.parametrize("kind", [one for one in KINDS if one is not RECOVER], ids=lambda k: k.name)
def test_it_goes_with_a_killed_job_and_one_that_never_begins(
    left: Path, tmp_path: Path, kind: JobKind[Any, Any], *, is_revoked: bool
) -> None:
    host = LocalHost("here", tmp_path, "127.0.0.1")
    job = attach(kind, host, "r1")
    request = EXAMPLES[kind.name].request
    request = replace(request, store=replace(request.store, key=left))
    job.files.path.mkdir(parents=True)
    asyncio.run(job.give("web", request))
    if is_revoked:
        job.files.revoked.touch()
        asyncio.run(serve(kind, job.files.path, ["true"]))
    else:
        asyncio.run(recover(kind, job.files.path))
    assert not left.exists()


def test_one_that_nobody_takes_is_forgotten_in_time(left: Path) -> None:
    forget_old_secrets(time.time() + 500)
    assert left.exists()
    forget_old_secrets(time.time() + 700)
    assert not left.exists()


@pytest.mark.parametrize("planted", ["file", "link", "directory", "open directory"])
def test_a_name_that_another_user_took_gets_no_secret(tmp_path: Path, planted: str) -> None:
    """Names in /dev/shm can be guessed: what is there already is neither followed nor reused."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    host = LocalHost("here", tmp_path, "127.0.0.1")
    run = f"test-{os.getpid()}"
    name, target = IN_MEMORY / f"vmckpt-key-{run}", tmp_path / "target"
    target.touch()
    match planted:
        case "file":
            name.touch(0o666)
        case "link":
            name.symlink_to(target)
        case _:
            name.mkdir(mode=0o777 if "open" in planted else 0o700)
    os.chown(name, 65534, 65534, follow_symlinks=False)

    async def write() -> None:
        async with written_on(host, run, b"the secret"):
            raise AssertionError("it was written")

    try:
        with pytest.raises(StorageError, match="is not private"):
            asyncio.run(write())
        assert target.read_bytes() == b""
        # The kernel follows no link of another user's there (fs.protected_symlinks).
        if not name.is_symlink() and name.is_dir():
            assert list(name.iterdir()) == []
    finally:
        name.unlink() if name.is_symlink() or not name.is_dir() else shutil.rmtree(name)


def test_a_secret_is_in_a_directory_of_its_owners_alone(tmp_path: Path) -> None:
    host, run = LocalHost("here", tmp_path, "127.0.0.1"), f"test-{os.getpid()}"

    async def taken() -> bytes | None:
        async with written_on(host, run, b"the secret") as path:
            assert path is not None
            modes = [one.stat().st_mode & 0o7777 for one in (path.parent, path)]
            assert modes == [0o700, 0o600]
            return taken_from(path)

    assert asyncio.run(taken()) == b"the secret"
    assert not list(IN_MEMORY.glob(f"vmckpt-key-{run}*"))
