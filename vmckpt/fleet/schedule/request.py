"""The operator's request for a schedule."""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.checkpoint.catalogue.retention import RetentionRule


class CatchUp(StrEnum):
    """What happens to runs that could not start when they were due."""

    ONCE = "once"
    SKIP = "skip"


class When(StrEnum):
    """What determines when a schedule's runs are due."""

    EVERY = "every"
    CRON = "cron"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """A schedule as requested.

    `every_s` belongs to EVERY, `cron` to CRON, `mtbf_s` (assumed until failures are observed) and
    `rpo_s` to AUTO. `window` is a part of each day, `zone` the time zone of that and of `cron`.
    `copies` are stores to which each checkpoint is copied.
    """

    vm: str
    when: When
    zone: str
    every_s: float | None = None
    cron: str | None = None
    mtbf_s: float | None = None
    rpo_s: float | None = None
    window: str | None = None
    jitter_s: float = 0.0
    catch_up: CatchUp = CatchUp.ONCE
    rule: RetentionRule | None = None
    store: str | None = None
    copies: tuple[str, ...] = ()
    kind: str = "epoch"
    max_pause_s: float = 0.010
    key_file: str | None = None
    key_command: str | None = None
    # After each run this percentage of the stores' content is read and verified.
    check_percent: float | None = None
