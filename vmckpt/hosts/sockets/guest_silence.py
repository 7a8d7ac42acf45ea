"""A migrated guest's silence, as an observer outside of it heard it."""

import time
from collections.abc import Callable

from vmckpt.deadlines import poll
from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host
from vmckpt.hosts.sockets.heartbeats import Silence, silence

HEARTBEAT_WAIT_S, HEARTBEAT_POLL_S = 2.0, 0.005


async def guest_silence(
    host: Host, guest: int | None, began_s: float, ended_s: float, note: Callable[[str, str], None]
) -> Silence | None:
    """The silence from the start of the transfer to the first heartbeat after its end.

    Both are on this machine's monotonic clock. None if there is no observer, or `guest` is None or
    was not heard before. A silent observer is only noted.
    """
    if guest is None:
        return None
    since_ns, ended_ns = (int(t * 1e9) for t in (began_s, ended_s))
    try:
        if not await silence(host, guest, since_ns - 10**9, since_ns):
            return None
        after = await poll(
            lambda: silence(host, guest, ended_ns, time.monotonic_ns()),
            every_s=HEARTBEAT_POLL_S,
            within_s=HEARTBEAT_WAIT_S,
        )
        until_ns = after.last_ns if after else time.monotonic_ns()
        return await silence(host, guest, since_ns, until_ns)
    except HostDownError as exc:
        note("heartbeats", str(exc))
        return None
