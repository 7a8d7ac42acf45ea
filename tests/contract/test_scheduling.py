"""Who comes first on a busy processor."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from vmckpt.hosts.scheduling import be_prompt, give_way, prompt

pytestmark = pytest.mark.contract


def in_a_thread(do: Callable[[], None]) -> None:
    """Whose policy ends with it."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(do).result()


def test_a_thread_gives_way_but_for_what_a_guest_waits_for() -> None:
    in_a_thread(_give_way)


def _give_way() -> None:
    give_way()
    assert os.sched_getscheduler(0) == os.SCHED_BATCH
    with pytest.raises(ValueError, match="wrong"), prompt():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        raise ValueError("wrong")
    assert os.sched_getscheduler(0) == os.SCHED_BATCH
    be_prompt()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_what_somebody_else_has_chosen_stays() -> None:
    in_a_thread(_keep_another_policy)


def _keep_another_policy() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    give_way()
    with prompt():
        assert os.sched_getscheduler(0) == os.SCHED_IDLE
