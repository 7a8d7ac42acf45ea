"""Of each kind of job a request and a result."""

from pathlib import Path
from typing import Any, NamedTuple

from tests.unit.test_checkpoint_tree import facts
from vmckpt.checkpoint import jobs
from vmckpt.checkpoint.fork import fork
from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
from vmckpt.checkpoint.restore.requests import Restored, RestoreOptions
from vmckpt.checkpoint.restore.restore_disks import DisksRestored
from vmckpt.hosts.host import HostEntry
from vmckpt.hosts.remote.tls import TlsEndpoint
from vmckpt.migrate.elsewhere import job as migration
from vmckpt.migrate.report import MigrationReport
from vmckpt.options.migration import MigrationOptions


class Example(NamedTuple):
    """What one job is asked, and what came of it."""

    request: Any
    result: Any


STORE = jobs.StoreRequest("/store")
WISH = RestoreOptions(None, in_place=True, eager=False, plugged=True, keep_macs=True)
REPORT = MigrationReport(
    "r1", "web", "a", "b", "auto", "precopy", "x509", "completed", 2.5, 1.5, 30, None,
    None, None, None, 7, 3, (), "",
)  # fmt: skip
EXAMPLES = {
    "migrate": Example(
        migration.MigrationRequest(
            HostEntry("b", Path("/b"), "127.0.0.1"),
            MigrationOptions(),
            TlsEndpoint("127.0.0.1", 1, "f", "t"),
        ),
        migration.MigrationResult(report=REPORT),
    ),
    "checkpoint": Example(
        jobs.Take(STORE, TakeOptions("one", {"by": "ci"}, "operator", 0.01)),
        TakenCheckpoint("ab" * 16, facts("one"), 3, None, apart=False, damaged=None),
    ),
    "restore": Example(
        jobs.Restore(STORE, WISH, "ab" * 16, "digest", is_foreign=False),
        Restored("web", "far", "ab" * 16, 1.0, 2.0, 3.5, 1e9, ("slow",), settled=True),
    ),
    "restore-disks": Example(
        jobs.Restore(STORE, WISH, "ab" * 16), DisksRestored("web", "far", "ab" * 16, ("/a",), ())
    ),
    "fork": Example(
        jobs.Fork(STORE, fork.ForkOptions("ab" * 16, "web-fork", 2, plugged=False)),
        jobs.Forks((fork.Forked("web-fork-1", 1.5), fork.Forked("web-fork-2", 0.0, "no room"))),
    ),
    "recover": Example(jobs.Recover(), jobs.Recover()),
}
