"""Checks when a schedule is added: its times, and its stores."""

from itertools import islice, pairwise

from vmckpt.checkpoint.catalogue.location import access_to, is_there, own, parse_location
from vmckpt.errors import RefusedError, UsageError
from vmckpt.fleet.schedule.due import Every
from vmckpt.fleet.schedule.record import ScheduleRecord
from vmckpt.fleet.schedule.work import key_of
from vmckpt.hosts.host import Host

# The number of calendar times examined for the shortest interval.
_LOOKED_AT = 60


def require_sense(record: ScheduleRecord) -> None:
    """Raises UsageError if it has no times, or they are too close for its jitter."""
    timing, request = record.timing, record.request
    gap_s = float("inf")
    if isinstance(timing.when, Every):
        gap_s = timing.when.every_s if request.every_s is not None else 0.0
    else:
        times = list(islice(timing.when.after(record.added.wall_s), _LOOKED_AT))
        if not times:
            window = f" within {request.window}" if request.window else ""
            raise UsageError(
                f"'{request.cron}' is never due{window}",
                why="no such time occurs in the coming years",
                remedy="fix the expression" + (", or the window" if window else ""),
            )
        gap_s = min((b - a for a, b in pairwise(times)), default=gap_s)
    if (part := timing.day.window) is not None:
        begins_s, ends_s = (at.hour * 3600 + at.minute * 60 + at.second for at in part)
        gap_s = min(gap_s, (ends_s - begins_s) % 86400)
    if request.jitter_s and request.jitter_s > gap_s / 2:
        raise UsageError(
            "--jitter is too long",
            why="beyond half of the time from one run to the next, or of the window, "
            "runs would overlap"
            if gap_s
            else "--every auto chooses its own interval",
            remedy="choose a shorter one, or leave it out",
        )


async def require_stores(record: ScheduleRecord, host: Host) -> None:
    """Check that each run will have its stores. Raises RefusedError, NotFoundError: one does not
    exist, is unencrypted although a key is given for it, or needs another key.
    """
    key, given = key_of(record), record.request.store
    location = parse_location(given, host) if given else own(host)
    await access_to(location, key, to_write=True, named=given is not None)
    for text in record.request.copies:
        location = parse_location(text)
        if text == record.request.store:
            raise RefusedError(
                f"checkpoints cannot be copied to {text}",
                why="that is the store that they are taken into",
                remedy="name another one with --copy-to",
            )
        if not await is_there(location):
            raise RefusedError(
                f"there is no store in {location.label}",
                why="checkpoints are copied only to existing stores",
                remedy=f"make it first: vmckpt store init {location.label}",
            )
        await access_to(location, key)
