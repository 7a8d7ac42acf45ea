"""What the operator asked of a schedule."""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.checkpoint.catalogue.retention import RetentionRule


class CatchUp(StrEnum):
    """What happens to runs that could not start when they were due."""

    ONCE = "once"
    SKIP = "skip"


class When(StrEnum):
    """By what a schedule's runs are due."""

    EVERY = "every"
    CRON = "cron"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """A schedule, as it was asked for.

    `every_s` belongs to EVERY, `cron` to CRON, `mtbf_s` (what is assumed before failures were seen)
    and `rpo_s` to AUTO. `window` is a part of each day, `zone` the time zone in which that and
    `cron` are meant. `copies` are stores that each checkpoint is copied to.
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
    # After each run this part of the stores' content is read and compared with its checksums.
    check_percent: float | None = None
