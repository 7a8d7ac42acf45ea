"""A scheduler as a process, on checkpoints that are files: to be killed, and to be started twice.

`python -m tests.schedule_process DIRECTORY serve|run-due`. The clock is DIRECTORY/off seconds ahead
of the machine's. Checkpoints are made by a process of its own (`tests.schedule_service`), which
outlives the scheduler, as on hosts.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.schedule_work import OnlyTaking
from vmckpt.cli.loop import run_until_interrupted
from vmckpt.cli.main import report
from vmckpt.errors import BusyError, VmckptError
from vmckpt.fleet.schedule.due import ClockReading
from vmckpt.fleet.schedule.learned import VmSample
from vmckpt.fleet.schedule.record import ScheduleRecord
from vmckpt.fleet.schedule.run import Event, Point, SchedulerTools, clock
from vmckpt.fleet.schedule.scheduler import run_due, serve
from vmckpt.hosts.lock import read_owner


class Files(OnlyTaking):
    """A checkpoint is a file of its id's name, made under the VM's lock by a service."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def find(self, record: ScheduleRecord) -> Point | None:
        assert record.making
        holder = read_owner(self._directory / "vm.lock")
        if (self._directory / "made" / record.making.id).exists():
            return Point(record.making.id, "point", 0.01, 0.1, 1)
        if holder:
            raise BusyError("'web' is busy", why=holder.action, remedy="wait")
        return None

    async def take(
        self, record: ScheduleRecord, begins: Callable[[str, str], None]
    ) -> Point | None:
        assert record.making
        begins("store", "host")
        words = ["-m", "tests.schedule_service", str(self._directory), record.making.id]
        child = await asyncio.create_subprocess_exec(sys.executable, *words, start_new_session=True)
        if await child.wait():
            raise BusyError("'web' is busy", why="another service is at it", remedy="wait")
        return Point(record.making.id, "point", 0.01, 0.1, 1)

    async def sample(self, record: ScheduleRecord, now: ClockReading) -> VmSample | None:
        return None


def main(directory: Path, verb: str) -> int:
    """One of the two."""

    def now() -> ClockReading:
        off_s = float((directory / "off").read_text() or 0)
        return clock()._replace(wall_s=time.time() + off_s)

    def tell(event: Event) -> None:
        print(json.dumps({"event": event.event, "text": event.text}), flush=True)

    tools = SchedulerTools(now, Files(directory), tell)
    try:
        if verb == "serve":
            run_until_interrupted(serve(tools))
        else:
            asyncio.run(run_due([], tools))
    except VmckptError as exc:
        return report(exc)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
