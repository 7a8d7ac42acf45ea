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

    def noticed(self, host: str, said: ReplicaStatus) -> list[Notification]:
        """Notifications of what changed, seen on `host`."""
        last, self._last = self._last, said
        found = [_notification(one, host, said) for one in self._occasions(last, said)]
        self._was_protected |= said.state == PROTECTED
        return found

    def _occasions(self, last: ReplicaStatus | None, said: ReplicaStatus) -> Iterator[Occasion]:
        if said.state == PROMOTED and (last is None or last.state != PROMOTED):
            yield Occasion.FAILOVER
        if said.state == PROTECTED and not self._was_protected:
            yield Occasion.PROTECTED
        if said.ending and (last is None or not last.ending):
            # Of a first copy that fails, its command tells. Only a recovery begins with an ending.
            if said.ending in _LOST or (
                said.ending == _ALONE and (self._was_protected or last is None)
            ):
                yield Occasion.PROTECTION_LOST
        elif last is not None and said.may_run is not last.may_run:
            if said.may_run is False:
                yield Occasion.GUEST_PAUSED
            elif last.may_run is False:
                yield Occasion.GUEST_RESUMED


def _notification(occasion: Occasion, host: str, said: ReplicaStatus) -> Notification:
    known, about = said.to_json(), str(said.run)
    if occasion in (Occasion.GUEST_PAUSED, Occasion.GUEST_RESUMED):
        about += f"/{time.time_ns()}"  # the others happen once
    return Notification.now(
        occasion,
        about=about,
        vm=str(said.vm),
        host=host,
        why=said.why or f"{said.role}: {said.state}",
        details={name: known[name] for name in _DETAILS if name in known},
    )
