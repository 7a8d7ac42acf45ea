"""The accuracy of forecasts: each run record that has one, compared with the result."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from vmckpt.events.record import RunRecord
from vmckpt.forecast.learned import pause_ms, shared_the_link
from vmckpt.forecast.model.forecast import Forecast, TransferMode, from_json


class Scored(NamedTuple):
    """One migration: forecast and result. `pause_s` is None if not measured."""

    run: str
    mode: TransferMode
    forecast: Forecast
    total_s: float
    pause_s: float | None
    sent_bytes: int

    @property
    def total_error(self) -> float:
        """Relative to the forecast's median; positive: it took longer."""
        return self.total_s / self.forecast.total_s.p50 - 1

    @property
    def pause_error_s(self) -> float | None:
        """The difference to the forecast's median."""
        return None if self.pause_s is None else self.pause_s - self.forecast.downtime_s.p50


class Score(NamedTuple):
    """The score of all moves by one method. Errors are absolute values; shares are fractions."""

    way: str
    moves: int
    total_error: float
    total_error_p90: float
    total_inside: float
    pause_error_s: float | None
    pause_inside: float | None


def scored(records: Iterable[RunRecord]) -> list[Scored]:
    """Every completed migration that was forecast to end and had an exclusive link."""
    found = []
    for record in records:
        result = record.result or {}
        if record.forecast is None or result.get("outcome") != "completed":
            continue
        if shared_the_link(record):
            continue
        one = from_json(record.forecast["forecast"])
        if not one.ends:
            continue
        pause = pause_ms(result)
        found.append(
            Scored(
                record.run,
                one.mode,
                one,
                result["total_time_s"],
                None if pause is None else pause / 1e3,
                result["transferred_bytes"],
            )
        )
    return found


def unforeseen(records: Iterable[RunRecord]) -> list[str]:
    """The runs that were forecast to end and did not, and those that ended against the forecast.

    Without those on a shared link.
    """
    wrong = []
    for record in records:
        if record.forecast is None or not record.result or shared_the_link(record):
            continue
        ends = record.forecast["forecast"]["ends"]
        outcome = record.result.get("outcome")
        if (ends and outcome == "timed-out") or (not ends and outcome == "completed"):
            wrong.append(record.run)
    return wrong


def in_company(records: Iterable[RunRecord]) -> list[str]:
    """The runs whose forecast is not judged because they shared their link."""
    return [one.run for one in records if one.forecast and one.result and shared_the_link(one)]


def score(moves: Sequence[Scored]) -> list[Score]:
    """A line for each method used, and one for all."""
    modes = sorted({move.mode for move in moves})
    lines = [_line(mode, [move for move in moves if move.mode is mode]) for mode in modes]
    return [*lines, _line("all", moves)] if moves else []


def _line(mode: str, moves: Sequence[Scored]) -> Score:
    errors = sorted(abs(move.total_error) for move in moves)
    pauses = [abs(e) for move in moves if (e := move.pause_error_s) is not None]
    inside = [
        move.forecast.downtime_s.holds(move.pause_s) for move in moves if move.pause_s is not None
    ]
    return Score(
        way=str(mode),
        moves=len(moves),
        total_error=median(errors),
        total_error_p90=errors[min(int(0.9 * len(errors)), len(errors) - 1)],
        total_inside=_share(move.forecast.total_s.holds(move.total_s) for move in moves),
        pause_error_s=median(pauses) if pauses else None,
        pause_inside=_share(inside) if inside else None,
    )


def _share(true: Iterable[bool]) -> float:
    values = list(true)
    return sum(values) / len(values)


def facts(moves: Sequence[Scored]) -> list[dict[str, Any]]:
    """The facts of each move, for `--json`."""
    return [
        {
            "run": move.run,
            "way": move.mode,
            "total_s": move.total_s,
            "forecast_total_s": move.forecast.total_s.to_json(),
            "pause_s": move.pause_s,
            "forecast_pause_s": move.forecast.downtime_s.to_json(),
        }
        for move in moves
    ]
