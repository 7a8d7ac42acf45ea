"""Which changes of a service's status an operator is notified of."""

import time
from collections.abc import Iterator

from vmckpt.notify.notification import Notification, Occasion
from vmckpt.replicate.status import PROMOTED, PROTECTED, ReplicaStatus

# Why a primary ends without being asked to, its guest protected by no standby. LOST: its guest is
# dead; so it is with `off`, which only its recovery says.
_ALONE, _LOST = "alone", ("lost", "off")
_DETAILS = ("run", "role", "primary", "standby", "term", "state", "ending", "epoch")


class Noticing:
    """Compares the statuses of one service, as they come."""

    def __init__(self) -> None:
        self._was_protected = False
        self._last: ReplicaStatus | None = None

    def noticed(self, host: str, status: ReplicaStatus) -> list[Notification]:
        """Notifications of what changed, seen on `host`."""
        last, self._last = self._last, status
        found = [_notification(one, host, status) for one in self._occasions(last, status)]
        self._was_protected |= status.state == PROTECTED
        return found

    def _occasions(self, last: ReplicaStatus | None, status: ReplicaStatus) -> Iterator[Occasion]:
        if status.state == PROMOTED and (last is None or last.state != PROMOTED):
            yield Occasion.FAILOVER
        if status.state == PROTECTED and not self._was_protected:
            yield Occasion.PROTECTED
        if status.ending and (last is None or not last.ending):
            # The command reports a failed first copy. Only a recovery begins with an ending.
            if status.ending in _LOST or (
                status.ending == _ALONE and (self._was_protected or last is None)
            ):
                yield Occasion.PROTECTION_LOST
        elif last is not None and status.may_run is not last.may_run:
            if status.may_run is False:
                yield Occasion.GUEST_PAUSED
            elif last.may_run is False:
                yield Occasion.GUEST_RESUMED


def _notification(occasion: Occasion, host: str, status: ReplicaStatus) -> Notification:
    known, about = status.to_json(), str(status.run)
    if occasion in (Occasion.GUEST_PAUSED, Occasion.GUEST_RESUMED):
        about += f"/{time.time_ns()}"  # the others happen once
    return Notification.now(
        occasion,
        about=about,
        vm=str(status.vm),
        host=host,
        why=status.why or f"{status.role}: {status.state}",
        details={name: known[name] for name in _DETAILS if name in known},
    )
