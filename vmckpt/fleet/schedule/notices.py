"""Which events of a schedule an operator is notified of."""

import time
from collections.abc import Callable

from vmckpt.fleet.schedule import run
from vmckpt.fleet.schedule.run import Event
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.notify.announce import announce
from vmckpt.notify.notification import Notification, Occasion


def notifying(tell: Callable[[Event], None]) -> Callable[[Event], None]:
    """`tell`, which hears of every event, and a notification of those that are a reason for it."""

    def notify(event: Event) -> None:
        tell(event)
        if occasion := occasion_of(event):
            announce(_notification(occasion, event))

    return notify


def occasion_of(event: Event) -> Occasion | None:
    """Notify of the first failure in a row, and of its end. Pure."""
    failures = event.more.get("failures_before", 0)
    match event.event:
        case "damaged":
            return Occasion.STORE_DAMAGED
        case "late":
            return Occasion.SCHEDULE_FAILED
        case "failed" | run.MISSED:
            return None if failures else Occasion.SCHEDULE_FAILED
        case run.DONE | run.SKIPPED:
            return Occasion.SCHEDULE_RECOVERED if failures else None
        case _:
            return None


def _notification(occasion: Occasion, event: Event) -> Notification:
    return Notification.now(
        occasion,
        about=f"{event.schedule}/{time.time_ns()}",
        vm=event.vm,
        host=local_host().name,
        why=event.text,
        details={"schedule": event.schedule, "event": event.event, **event.more},
    )
