"""What opens an encrypted store stays in a host's memory no longer than somebody may need it."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmckpt.checkpoint.secret import forget_old_secrets
from vmckpt.checkpoint.service import Asked, Files, recover_from, request_for
from vmckpt.hosts.local import LocalHost


@pytest.fixture
def left() -> Iterator[Path]:
    """A secret that nobody has taken."""
    path = Path(f"/dev/shm/vmckpt-key-test-{os.getpid()}")
    path.write_text("00ff")
    yield path
    path.unlink(missing_ok=True)


def test_it_goes_with_a_killed_service(left: Path, tmp_path: Path) -> None:
    host = LocalHost("here", tmp_path, "127.0.0.1")
    files = Files.of(host, "r1")
    files.path.mkdir(parents=True)
    files.request.write_text(request_for(host, Asked("restore", "web", "/store"), {}, left))
    asyncio.run(recover_from(files.path))
    assert not left.exists()


def test_one_that_nobody_takes_is_forgotten_in_time(left: Path) -> None:
    forget_old_secrets(time.time() + 500)
    assert left.exists()
    forget_old_secrets(time.time() + 700)
    assert not left.exists()
