"""Calendar times, and the beginning of a part of the day: Unix seconds, in a time zone.

cronsim parses cron expressions, and treats hours that a clock change skips or repeats as Debian's
cron does. No clock is read here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from vmckpt.errors import UsageError
from vmckpt.replicate.operator.keeping import DailyWindow

# How far back to search for the newest time before an instant: one of these is enough.
_BACK_S = (3600.0, 86400.0, 40 * 86400.0, 400 * 86400.0, 9 * 366 * 86400.0)
# After this many times in a row outside the window, assume that none is inside.
_MOST_OUTSIDE = 500


def parse_zone(name: str) -> ZoneInfo:
    """The zone of that name. Raises UsageError."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise UsageError(
            f"there is no time zone '{name}' here",
            why=str(exc),
            remedy="name one as in /usr/share/zoneinfo, e.g. Europe/Berlin (Debian: tzdata)",
        ) from exc


@dataclass(frozen=True, slots=True)
class Day:
    """A part of each day in a zone; `window` of None is all of it."""

    window: DailyWindow | None
    zone: ZoneInfo

    def has(self, unix_s: float) -> bool:
        """Whether an instant is in it."""
        if self.window is None:
            return True
        return self.window.has(datetime.fromtimestamp(unix_s, self.zone).time())

    def opened_s(self, unix_s: float) -> float | None:
        """When it last began, at or before an instant; None: it has no beginning, being all day."""
        if self.window is None:
            return None
        return next(at for at in self._begins(unix_s, range(0, -4, -1)) if at <= unix_s)

    def opens_s(self, unix_s: float) -> float:
        """The instant itself if it is in the window, otherwise the window's next start."""
        if self.has(unix_s):
            return unix_s
        return next(at for at in self._begins(unix_s, range(4)) if at > unix_s)

    def _begins(self, unix_s: float, days: range) -> Iterator[float]:
        if self.window is None:
            return
        today = datetime.fromtimestamp(unix_s, self.zone).date()
        for number in days:
            day = today + timedelta(days=number)
            yield datetime.combine(day, self.window.begins, self.zone).timestamp()


@dataclass(frozen=True, slots=True)
class Calendar:
    """The times of a cron expression in a zone, within a part of each day only."""

    expression: str
    day: Day

    @classmethod
    def parse(cls, expression: str, day: Day) -> "Calendar":
        """Raises UsageError if it is not a valid expression, or names no time."""
        fields = len(expression.split())
        try:
            if fields != 5:
                raise CronSimError(f"it has {fields} fields")
            CronSim(expression, datetime.fromtimestamp(0, day.zone))
        except CronSimError as exc:
            raise UsageError(
                f"'{expression}' is not a calendar expression",
                why=str(exc),
                remedy="write five fields as in crontab(5): '0 3 * * *' is at 3:00 each day",
            ) from exc
        return cls(expression, day)

    def after(self, unix_s: float) -> Iterator[float]:
        """Its times after an instant, in order."""
        outside = 0
        while outside < _MOST_OUTSIDE:
            for at in self._any_after(unix_s):
                if not self.day.has(at):
                    # Skip the times in between at once.
                    unix_s, outside = max(unix_s, self.day.opens_s(at) - 1), outside + 1
                    break
                unix_s, outside = at, 0
                yield at
            else:
                return

    def newest(self, after_s: float, until_s: float) -> float | None:
        """Its last time after one instant and up to another; None: there is none."""
        for back_s in _BACK_S:
            found = None
            for at in self.after(max(after_s, until_s - back_s)):
                if at > until_s:
                    break
                found = at
            if found is not None or until_s - back_s <= after_s:
                return found
        return None

    def _any_after(self, unix_s: float) -> Iterator[float]:
        # Started within a repeated hour, it yields that hour again.
        last_s = unix_s
        for found in CronSim(self.expression, datetime.fromtimestamp(unix_s, self.day.zone)):
            at = found.timestamp()
            if at > last_s:
                last_s = at
                yield at
