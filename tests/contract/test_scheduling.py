"""Who comes first on a busy processor."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vmckpt.hosts.scheduling import (
    be_prompt,
    give_way,
    other_session_first,
    other_session_usual,
    prompt,
)

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


SESSION = Path("/proc/self/autogroup")
PROGRAM = """
import os
from tests.contract.test_scheduling import session_niceness
from vmckpt.hosts.scheduling import session_comes_last, session_has_waited, session_prompt

def niceness():
    print(session_niceness(), len(os.sched_getaffinity(0)))

session_comes_last()
niceness()
with session_prompt(), session_prompt():
    niceness()
niceness()
with session_prompt():
    session_has_waited()
niceness()
session_comes_last()
niceness()
"""


def session_niceness() -> str:
    """The group's, which belongs to all processes of a session; the first session's, init's, is
    the only one that has none.
    """
    return (SESSION.read_text().split() or ["none"])[-1]


@pytest.mark.skipif(not SESSION.exists(), reason="this kernel has no groups by session")
def test_another_session_comes_first_for_a_moment() -> None:
    """And for no longer, whatever becomes of whoever wanted it."""
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
    session = Path(f"/proc/{other.pid}/autogroup")
    with other:
        session.write_text("5")
        with pytest.raises(ValueError, match="wrong"), other_session_first(other.pid):
            assert niceness_in(session) == (-10 if os.geteuid() == 0 else 5)
            raise ValueError("wrong")
        assert niceness_in(session) == 5
        other_session_usual(other.pid)
        assert niceness_in(session) == 5
        if os.geteuid() == 0:
            session.write_text("-10")
            other_session_usual(other.pid)
            assert niceness_in(session) == 0
        other.kill()
    with other_session_first(other.pid):
        other_session_usual(other.pid)


PROMPT = """
import sys
from pathlib import Path
from vmckpt.hosts.scheduling import other_session_first

with other_session_first(int(sys.argv[1])):
    print(Path(f"/proc/{sys.argv[1]}/autogroup").read_text().split()[-1])
"""


@pytest.mark.skipif(not SESSION.exists(), reason="this kernel has no groups by session")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, who gives up a part of it")
def test_no_session_is_put_first_that_may_not_be_put_back_at_once() -> None:
    """Who has CAP_SYS_NICE alone may change one every 100 ms, after anybody else's change."""
    few = ["setpriv", "--inh-caps=-sys_admin", "--bounding-set=-sys_admin"]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as other:
        said = {
            words: subprocess.run(
                [*words, sys.executable, "-c", PROMPT, str(other.pid)], capture_output=True,
                text=True, check=True, timeout=60,
            ).stdout.strip()
            for words in ((), tuple(few))
        }  # fmt: skip
        assert said == {(): "-10", tuple(few): "0"}
        assert niceness_in(Path(f"/proc/{other.pid}/autogroup")) == 0
        other.kill()


@pytest.mark.skipif(not SESSION.exists(), reason="this kernel has no groups by session")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_session_that_a_killed_service_left_first_does_not_stay_so() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as other:
        session = Path(f"/proc/{other.pid}/autogroup")
        session.write_text("-10")
        with other_session_first(other.pid):
            assert niceness_in(session) == -10
        assert niceness_in(session) == 0
        other.kill()


def niceness_in(session: Path) -> int:
    return int(session.read_text().split()[-1])


@pytest.mark.skipif(not SESSION.exists(), reason="this kernel has no groups by session")
@pytest.mark.parametrize("leads", [True, False])
def test_a_session_comes_last_if_it_is_its_own(leads: bool) -> None:
    usual, first = session_niceness(), "-10" if os.geteuid() == 0 else "0"
    every = len(os.sched_getaffinity(0))
    few = max(every - 1, 1)
    last = ["10", str(few)] if leads else [usual, str(every)]
    usually = ["0" if leads else usual, str(every)]
    now = [first if leads else usual, str(every)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], start_new_session=leads, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    assert [line.split() for line in done.stdout.splitlines()] == [
        last,
        now,
        last,
        usually,
        usually,
    ]
    assert session_niceness() == usual
