"""`ScheduleActions` of a schedule that has checkpoints taken, and nothing else done."""

from vmckpt.fleet.schedule.record import ScheduleRecord
from vmckpt.fleet.schedule.run import Checked, Gone, Point


class OnlyTaking:
    """Copies, removes and checks nothing."""

    async def copy(self, record: ScheduleRecord, point: Point) -> list[str]:
        return []

    async def prune(self, record: ScheduleRecord, taken: str) -> Gone:
        return Gone([])

    async def check(self, record: ScheduleRecord) -> Checked:
        return Checked([], [], {})
