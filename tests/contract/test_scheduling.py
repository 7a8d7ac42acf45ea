"""Who comes first on a busy processor."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vmckpt.hosts.processes.scheduling import (
    batch_priority,
    end_real_time,
    high_priority,
    in_real_time,
    normal_priority,
)

pytestmark = pytest.mark.contract


def in_a_thread(do: Callable[[], None]) -> None:
    """Whose policy ends with it."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(do).result()


def test_a_thread_gives_way_but_for_what_a_guest_waits_for() -> None:
    in_a_thread(_batch_priority)


def _batch_priority() -> None:
    batch_priority()
    assert os.sched_getscheduler(0) == os.SCHED_BATCH
    with pytest.raises(ValueError, match="wrong"), high_priority():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        raise ValueError("wrong")
    assert os.sched_getscheduler(0) == os.SCHED_BATCH
    normal_priority()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_what_somebody_else_has_chosen_stays() -> None:
    in_a_thread(_keep_another_policy)


def _keep_another_policy() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    batch_priority()
    with high_priority():
        assert os.sched_getscheduler(0) == os.SCHED_IDLE


SESSION = Path("/proc/self/autogroup")
PROGRAM = """
import os
from tests.contract.test_scheduling import session_niceness
from vmckpt.hosts.processes.scheduling import (
    end_session_low_priority, session_high_priority, session_low_priority
)

def niceness():
    print(session_niceness(), len(os.sched_getaffinity(0)), os.sched_getscheduler(0))

session_low_priority()
niceness()
with session_high_priority(), session_high_priority():
    niceness()
niceness()
with session_high_priority():
    end_session_low_priority()
niceness()
session_low_priority()
niceness()
"""


def session_niceness() -> str:
    """The group's, which belongs to all processes of a session; the first session's, init's, is
    the only one that has none.
    """
    return (SESSION.read_text().split() or ["none"])[-1]


REAL_TIME = os.SCHED_RR | os.SCHED_RESET_ON_FORK
THREADS = """
import os, threading, time
threads = [threading.Thread(target=time.sleep, args=(600,), daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
os.sched_setscheduler(threads[0].native_id, os.SCHED_BATCH, os.sched_param(0))
os.sched_setscheduler(threads[1].native_id, os.SCHED_FIFO, os.sched_param(1))
print(*(thread.native_id for thread in threads), flush=True)
time.sleep(600)
"""
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes root")


@pytest.fixture
def other() -> Iterator[tuple[int, list[int]]]:
    """A process: its pid, and its threads, the main one first."""
    with subprocess.Popen([sys.executable, "-c", THREADS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.pid, [process.pid, *map(int, process.stdout.readline().split())]
        finally:
            process.kill()


def policies(threads: Sequence[int]) -> list[int]:
    return [os.sched_getscheduler(thread) for thread in threads]


OF_ALL = [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_FIFO, os.SCHED_OTHER]


@AS_ROOT
def test_a_process_and_this_thread_wait_for_nobody_for_a_moment(
    other: tuple[int, list[int]],
) -> None:
    pid, threads = other
    batch_priority()
    with pytest.raises(ValueError, match="wrong"), in_real_time(pid):
        with in_real_time():
            assert os.sched_getscheduler(0) == REAL_TIME
        assert policies([0, *threads]) == [REAL_TIME] * 3 + [os.SCHED_FIFO, REAL_TIME]
        child = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
        said = subprocess.run(child, capture_output=True, text=True, check=True).stdout
        assert int(said) == os.SCHED_OTHER
        raise ValueError("wrong")
    assert policies([0, *threads]) == [os.SCHED_BATCH, *OF_ALL]
    normal_priority()


@AS_ROOT
def test_nobody_stays_so_whose_teller_was_killed(other: tuple[int, list[int]]) -> None:
    pid, threads = other
    for thread in threads:
        os.sched_setscheduler(thread, REAL_TIME, os.sched_param(1))
    with in_real_time(pid):
        assert policies(threads) == [REAL_TIME] * 4
    assert policies(threads) == [os.SCHED_OTHER] * 4
    for thread in threads[1:]:
        os.sched_setscheduler(thread, REAL_TIME, os.sched_param(1))
    end_real_time(pid)
    assert policies(threads) == [os.SCHED_OTHER] * 4


NO_WAY_BACK = ["setpriv", "--inh-caps=-sys_nice", "--bounding-set=-sys_nice"]
UNPRIVILEGED = """
import os, sys
from vmckpt.hosts.processes.scheduling import in_real_time

with in_real_time(int(sys.argv[1])):
    print(os.sched_getscheduler(0), os.sched_getscheduler(int(sys.argv[1])))
"""


@AS_ROOT
def test_who_may_not_have_it_goes_on_as_before(other: tuple[int, list[int]]) -> None:
    pid, threads = other
    said = subprocess.run(
        [*NO_WAY_BACK, sys.executable, "-c", UNPRIVILEGED, str(pid)],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert said.split() == ["0", "0"]
    assert policies(threads) == OF_ALL


def test_a_process_that_has_ended_is_none() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with in_real_time(ended.pid):
        end_real_time(ended.pid)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


USUAL, IDLE = str(os.SCHED_OTHER), str(os.SCHED_IDLE)


@pytest.mark.skipif(not SESSION.exists(), reason="this kernel has no groups by session")
@pytest.mark.parametrize("leads", [True, False])
def test_a_session_comes_last_if_it_is_its_own(leads: bool) -> None:
    is_root = os.geteuid() == 0
    usual, first = session_niceness(), "-10" if is_root else "0"
    every = len(os.sched_getaffinity(0))
    alone = ["10", str(every), IDLE] if is_root else ["10", str(max(every - 1, 1)), USUAL]
    last = alone if leads else [usual, str(every), USUAL]
    usually = ["0" if leads else usual, str(every), USUAL]
    now = [first if leads else usual, str(every), USUAL]
    assert _said(PROGRAM, leads=leads) == [last, now, last, usually, usually]
    assert session_niceness() == usual


def _said(program: str, *first: str, leads: bool = True) -> list[list[str]]:
    done = subprocess.run(
        [*first, sys.executable, "-c", program], start_new_session=leads, capture_output=True,
        text=True, check=True, timeout=60,
    )  # fmt: skip
    return [line.split() for line in done.stdout.splitlines()]


@AS_ROOT
def test_whoever_could_not_be_a_usual_one_again_never_is_an_idle_one() -> None:
    """A guest would are paused for a service that gets what no one else wants."""
    said = _said("import resource\nresource.setrlimit(resource.RLIMIT_NICE, (0, 0))" + PROGRAM,
                 *NO_WAY_BACK)  # fmt: skip
    assert [policy for *_, policy in said] == [USUAL] * 5
    every = len(os.sched_getaffinity(0))
    few = max(every - 1, 1)
    assert [int(processors) for *_, processors, _ in said] == [few, every, few, every, every]


POLICIES = """
import os, threading
from vmckpt.hosts.processes.scheduling import (
    end_session_low_priority, session_low_priority, share_processor
)

def policy(thread=0):
    print(os.sched_getscheduler(thread))

if chosen:
    os.sched_setscheduler(0, chosen, os.sched_param(0))
session_low_priority()
other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
policy(), policy(other.native_id)
end_session_low_priority()
policy(), policy(other.native_id)
share_processor()
policy()
"""


@AS_ROOT
def test_after_its_time_all_its_threads_take_their_turns() -> None:
    said = _said(f"chosen = None{POLICIES}")
    assert said == [[IDLE], [IDLE], [USUAL], [USUAL], [USUAL]]


@AS_ROOT
def test_who_was_an_idle_one_before_stays_one_until_somebody_needs_it() -> None:
    said = _said(f"chosen = os.SCHED_IDLE{POLICIES}".replace("chosen", "import os; chosen", 1))
    assert said == [[IDLE], [IDLE], [IDLE], [IDLE], [USUAL]]


RECOVERY = """
import os
from pathlib import Path
from vmckpt.cli.hidden.job import job
from vmckpt.jobs import serve

async def recover(kind, directory):
    print(os.sched_getscheduler(0))

serve.recover = recover
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
job("restore", Path("nowhere"), recover=True)
"""


@AS_ROOT
def test_what_follows_a_services_death_takes_its_turns() -> None:
    """A guest may are paused, or be silent, until it is done."""
    assert _said(RECOVERY) == [[USUAL]]
