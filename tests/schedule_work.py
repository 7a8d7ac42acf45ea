"""`Work` of a schedule that has checkpoints taken, and nothing else done."""

from vmckpt.fleet.schedule.record import Record
from vmckpt.fleet.schedule.run import Checked, Gone, Point


class OnlyTaking:
    """Copies, removes and checks nothing."""

    async def copy(self, record: Record, point: Point) -> list[str]:
        return []

    async def prune(self, record: Record, taken: str) -> Gone:
        return Gone([])

    async def check(self, record: Record) -> Checked:
        return Checked([], [], {})
