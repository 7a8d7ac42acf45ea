"""The directory of one job, STATE/jobs/KIND/RUN on its host."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from vmckpt.errors import OutcomeUnknownError, StorageError
from vmckpt.hosts.processes.process import PROCESS, is_alive

DIRECTORY = "jobs"


class JobFiles(NamedTuple):
    """The files of one job."""

    path: Path

    @classmethod
    def of(cls, state_dir: Path, kind: str, run: str) -> Self:
        """Those of a run, below a host's state directory."""
        return cls(jobs_dir(state_dir, kind) / run)

    @property
    def run(self) -> str:
        """The run's id."""
        return self.path.name

    @property
    def order(self) -> Path:
        """The request (`kind.JobOrder`); the process starts first and waits for it."""
        return self.path / "order.json"

    @property
    def process(self) -> Path:
        """The process that does the job; written before it checks for `revoked`."""
        return self.path / "process.json"

    @property
    def revoked(self) -> Path:
        """Exists once the job is revoked; checked before any work begins."""
        return self.path / "revoked"

    @property
    def events(self) -> Path:
        """Its events, a line of JSON each."""
        return self.path / "events.jsonl"

    @property
    def outcome(self) -> Path:
        """The result or error (`kind.Outcome`)."""
        return self.path / "outcome.json"

    @property
    def control(self) -> Path:
        """Control socket, of kinds that have one."""
        return self.path / "control.sock"

    @property
    def trace(self) -> Path:
        """What it does, a line each, if the command that started it traces."""
        return self.path / "trace.log"

    @property
    def log(self) -> Path:
        """Its process's standard error."""
        return self.path / "job.log"

    @property
    def recovery_log(self) -> Path:
        """Standard error of its dead-man's switch."""
        return self.path / "recovery.log"


def new_run() -> str:
    """The id of a run that begins now."""
    return time.strftime("%Y%m%d-%H%M%S-") + os.urandom(2).hex()


def jobs_dir(state_dir: Path, kind: str) -> Path:
    """The parent directory of all jobs of one kind."""
    return state_dir / DIRECTORY / kind


def earlier_order(state_dir: Path, run: str) -> Path:
    """The request of a migration that an earlier version started."""
    return state_dir / DIRECTORY / run / "job.json"


def forget_old(state_dir: Path, kind: str, kept_s: float, now_unix_s: float) -> None:
    """Remove jobs of a kind that were last written to `kept_s` ago, if their process has ended.

    The clock may have jumped. Includes jobs of earlier versions, which used other directories. What
    cannot be removed stays: it is not a reason for the next job to fail.
    """
    earlier = (*state_dir.glob("checkpointing/*/"), *state_dir.glob(f"{DIRECTORY}/*/job.json"))
    paths = [path.parent if path.is_file() else path for path in earlier]
    for path in (*jobs_dir(state_dir, kind).glob("*/"), *paths):
        with suppress(OSError):  # another job may be removing it too
            last_unix_s = max(one.stat().st_mtime for one in (path, *path.iterdir()))
            if now_unix_s - last_unix_s > kept_s and not _is_running(JobFiles(path)):
                import shutil  # costs 1 ms

                shutil.rmtree(path)


def _is_running(files: JobFiles) -> bool:
    try:
        return is_alive(PROCESS.decode(files.process.read_bytes(), files.process))
    except OutcomeUnknownError:
        return True
    except (OSError, StorageError):  # it has not begun, or was begun by an earlier version
        return False
