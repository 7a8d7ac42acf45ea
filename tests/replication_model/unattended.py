"""What acts without an operator: `replicate keep`, and the autostart of a host that has booted."""

from collections import Counter

from tests.replication_model.asking import KEEP, RefusedError
from tests.replication_model.machine import Host, Said
from tests.replication_model.operator import Command
from tests.replication_model.world import sleep
from vmckpt.fleet.autostart import RETRY_S
from vmckpt.replicate.operator.keep import AGAIN_S, CHECK_S, LONGEST_S
from vmckpt.replicate.operator.keeping import KeepingMove, KeepingView, decide
from vmckpt.replicate.status import DEAD, ENDED

# For how long the unit of vmckpt-autostart tries.
STARTS_S = 300.0


class Keep(Command):
    """keep.keep; `named`: the names of the hosts that may run the VM."""

    def __init__(self, desk: Host, hosts: tuple[Host, ...], named: str, window_s: float) -> None:
        super().__init__(desk, hosts)
        self._all, self._named = hosts, tuple(host for host in hosts if host.name in named)
        self._window_until_s = self.world.now_s + window_s if window_s else float("inf")

    async def _run(self, kind: str, on: Host | None) -> None:
        again_s, failures = AGAIN_S, Counter[str]()
        while True:
            rest_s, tried = CHECK_S, Counter[str]()
            try:
                await self._kept(failures, tried)
                again_s = AGAIN_S
            except RefusedError as exc:
                self.world.note(f"{KEEP}: {exc}")
                failures += tried or Counter([""])
                rest_s, again_s = again_s, min(LONGEST_S, 2 * again_s)
            await sleep(rest_s)

    async def _kept(self, failures: Counter[str], tried: Counter[str]) -> None:
        self._hosts = self._named
        known = sorted(self._named, key=lambda host: failures[host.name])
        move, at, reason, is_cut_off = await self._inspected(known)
        if is_cut_off:
            move, at, reason, is_cut_off = await self._inspected(known)
        self._hosts = self._named if "named" in self.world.without else self._all
        if move is KeepingMove.PROTECT and at is not None:
            tried[reason] += 1
            self.world.note(f"{KEEP}: protect {at.name} by {reason}")
            if is_cut_off:
                await self._stop(is_dead=False)
            await self._protect(next(one for one in self._named if one.name == reason), at)
            failures.clear()
            self.world.count(f"{KEEP}: protected")
        elif move in (KeepingMove.FREE, KeepingMove.STOP):
            self.world.note(f"{KEEP}: {move.name}")
            await self._stop(is_dead=False)
            self.world.count(f"{KEEP}: {move.name.lower()} done")

    async def _inspected(self, known: list[Host]) -> tuple[KeepingMove, Host | None, str, bool]:
        """keep._inspect"""
        up, silent = await self._reached()
        homes = [host for host in up if host.home is not None]
        if len(homes) > 1 and await self._settle():
            left = [host for host in up if self.sees(host) and host.home is not None]
            homes = left if len(left) == 1 else homes
        alive = [host for host in homes if host.qemu_of(host.home) is not None]
        if not (silent or homes):
            raise RefusedError("there is no such VM")
        at = alive[0] if len(alive) == 1 else None
        said = {host: one for host in up if (one := await self._side_of(host)) is not None}
        roles = frozenset(one.role for one in said.values() if one.answers)
        is_cut_down = len(homes) == 1 and not alive and _are_killed(said, homes[0])
        names = frozenset(host.name for host in up)
        is_time = self.world.now_s < self._window_until_s
        view = KeepingView(at.name if at else "", roles, names, is_time, is_cut_down)
        move, reason = decide(view, [host.name for host in known])
        ends = {view.home, reason} if move is KeepingMove.PROTECT else names
        is_cut_off = any(
            host.name in ends and not one.answers and one.state not in ENDED
            for host, one in said.items()
        )
        return move, at, reason, is_cut_off


def _are_killed(said: dict[Host, Said], home: Host) -> bool:
    """keep._are_killed"""
    primary = said.get(home)
    was_killed = primary is not None and primary.role == "primary" and primary.state == DEAD
    return was_killed and all(one.state in (DEAD, *ENDED) for one in said.values())


class Autostart(Command):
    """fleet.autostart, on a host that has booted, which asks others over the hosts' own network."""

    def sees(self, host: Host) -> bool:
        """Whether that host answers it."""
        is_near = host is self.host or self.world.now_s >= self.world.paths_up_from_s[0]
        return host.is_up and is_near

    async def _run(self, kind: str, on: Host | None) -> None:
        until_s = self.world.now_s + STARTS_S
        is_first = True
        while is_first or self.world.now_s < until_s:
            if not is_first:
                await sleep(RETRY_S)
            is_first = False
            try:
                home = self.host.home
                if home is None or self.host.qemu_of(home) is not None:
                    break
                if await self._find() is self.host:
                    await self._start_vm()
                    self.world.count("autostarted")
                break
            except RefusedError as exc:
                self.world.note(f"autostart on {self.host.name}: {exc}")
        self.is_done = True
        self.end()
