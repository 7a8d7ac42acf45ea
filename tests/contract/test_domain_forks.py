"""What forks of a domain do before any of them is made."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.checkpoint.fork import domains
from vmckpt.hosts.local import LocalHost

pytestmark = pytest.mark.contract


def test_if_every_name_is_in_use_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the memory that they share takes long."""

    def loads(*_: object) -> None:
        pytest.fail("nothing was to be reserved or loaded")

    monkeypatch.setattr(domains, "room_for_all", loads)
    facts: Any = SimpleNamespace(memory_bytes=1 << 20)
    nothing: Any = None
    work = domains._DomainForking(LocalHost("here", tmp_path, "127.0.0.1"), nothing, facts, nothing)
    plans: list[Any] = [SimpleNamespace(name=f"copy-{number}") for number in (1, 2)]
    taken = [domains._HeldFork(plan, f"there is a VM '{plan.name}' already") for plan in plans]
    made = asyncio.run(work.run(taken, "r", overcommit=False))
    assert [(one.name, one.error) for one in made] == [
        ("copy-1", "there is a VM 'copy-1' already"),
        ("copy-2", "there is a VM 'copy-2' already"),
    ]
