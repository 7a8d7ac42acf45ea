"""What a test may use, and when it runs.

Its folder says what it may use: tests/unit, contract, etcd, qemu, real, role, packages, systemd,
kernel or vfio. What is marked `long` runs with `--long` alone. Of the tests that run on every kind
of hosts (kinds.py), those on hosts that look like machines are long but for the ones marked
`sample`.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, however slow the machine: what fails here fails everywhere.
settings.register_profile("the same everywhere", derandomize=True, deadline=None)
settings.load_profile("the same everywhere")

# Commands under nohup hear no hang-up; those that tests start do, whoever started the tests.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# In the order that they run in: what is short comes last, so that of several workers none is left
# with a long file when the others have nothing more to do.
KINDS = (
    *("role", "packages", "systemd", "kernel", "vfio", "real", "qemu", "etcd", "contract", "unit"),
)
HERE = Path(__file__).parent
# Files of tests/contract that take more than two seconds each: `make check` leaves them out.
SLOW = [
    "append_only_s3",
    "arp_probes",
    "checkpoint_disks",
    "checkpoint_names",
    "checkpoint_services",
    "complete",
    "damage_records",
    "dirty_pages",
    "disks_over_the_wire",
    "domain_dirty_rate",
    "domain_settling",
    "drain",
    "drain_commands",
    "epoch_guard",
    "fencing",
    "group_services",
    "guard",
    "guard_commands",
    "guard_worker",
    "guest_hook",
    "guest_ssh",
    "host",
    "host_commands",
    "hostile_hosts",
    "hotplug",
    "images",
    "jobs",
    "lease_stores",
    "notifications",
    "pager",
    "pins",
    "processes",
    "remote_session",
    "replicated_aside",
    "replication_applied",
    "replication_claim",
    "replication_dead_ends",
    "replication_endings",
    "replication_ends",
    "replication_guard",
    "replication_hand_over",
    "replication_leftovers",
    "replication_terms",
    "replication_without_arbiter",
    "resource_agent",
    "schedule_processes",
    "ssh",
    "store_bundles",
    "store_commands",
    "store_config",
    "store_cut_off",
    "store_damage",
    "store_flips",
    "store_full",
    "store_healing",
    "store_kills",
    "store_lost_locks",
    "store_odd_storage",
    "store_replaced",
    "store_requests",
    "store_siege",
    "stores",
    "tls_link",
    "unreadable_sectors",
    "whose_names",
]


@pytest.fixture(autouse=True, scope="session")
def _no_cache_of_the_users() -> Iterator[None]:
    """What stores keep of object storage goes with the tests."""
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VMCKPT_CACHE_DIR", path)
        yield


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    """A command that a test runs in its own process sets its umask for that test alone."""
    usual = os.umask(0o022)
    os.umask(usual)
    yield
    os.umask(usual)


@pytest.fixture(autouse=True)
def _usual_turns() -> Iterator[None]:
    """A service that a test runs in its own process gives way to others for that test alone."""
    yield
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory: where pytest puts files, paths are too long for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="vk-", dir="/tmp") as path:
        yield Path(path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also the tests marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        kind = item.path.relative_to(HERE).parts[0]
        if kind not in KINDS:
            raise pytest.UsageError(f"{item.path}: tests live in tests/{{{','.join(KINDS)}}}/")
        on_machines = item.get_closest_marker("real") and not item.get_closest_marker("sample")
        if kind != "real" and on_machines:
            item.add_marker("long")
        item.add_marker(kind)
        if kind == "contract" and item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker("slow")
    items.sort(key=lambda item: KINDS.index(item.path.relative_to(HERE).parts[0]))
    if not config.getoption("--long"):
        config.hook.pytest_deselected(items=[one for one in items if is_long(one)])
        items[:] = [one for one in items if not is_long(one)]


def is_long(item: pytest.Item) -> bool:
    """Whether it runs with `--long` alone."""
    return item.get_closest_marker("long") is not None
