"""`replicate stop`, as replicate/operator/stop.py."""

from tests.replication_model.asking import (
    FAILOVER,
    PROTECT,
    STOP,
    STOP_GONE,
    STOP_OFF,
    WAIT,
    Asking,
    RefusedError,
    Side,
    SilentError,
    has_left,
    is_over_to_standby,
    others_of,
    refused,
)
from tests.replication_model.machine import Files, Home, Host, Said
from tests.replication_model.process import POLL_S
from tests.replication_model.recovery import Abandon, Recovery, end_waiting, holder_of
from tests.replication_model.world import sleep
from vmckpt.lease.rule import Right
from vmckpt.replicate.arbiter import ARBITER_S
from vmckpt.replicate.control import GO_ALONE, GO_ALONE_UNLESS_TAKEN, TIMEOUT_S
from vmckpt.replicate.operator.terms import ABANDON_S
from vmckpt.replicate.status import DEAD, PROMOTED


class Stopping(Asking):
    """One that may end a protection."""

    async def _stop(self, *, is_dead: bool) -> None:
        """stop.stop"""
        refused_for = self._refused_for() if is_dead else None
        found = await self._sides_if_any(is_refused=refused_for is not None)
        if not found:
            if refused_for is None:
                raise RefusedError("it is not replicated", PROTECT)
            refused_for.gone_replica, refused_for.listed_replica = refused_for.listed_replica, None
            return
        answering = {said.role for _, said in found if said.answers}
        is_alive = any(
            said.state == DEAD and host.qemu_of(host.home) is not None
            for host, said in found
            if said.role == "primary"
        )
        if "standby" in answering and "primary" not in answering and not is_alive:
            raise RefusedError("the standby may have the only copy of the guest", FAILOVER)
        has_arbiter = True
        for host, said in found:
            if said.answers and said.role == "primary":
                has_arbiter = await self._primary_ended(host, said, is_dead=is_dead)
        for host, _ in found:
            await self._until_gone(host)
        await self._settle_if_seen()
        if not (is_dead or any(said.role == "standby" for _, said in found)):
            await self._require_no_other_home(found)
        if has_arbiter:
            await self._settle_term(found, is_dead=is_dead)
        await self._settle_if_seen()
        asking = await self._require_may_run(found, is_dead=is_dead)
        for host, said in found:
            await self._reach(host)
            if host is not asking:
                self._forget(host, said)

    async def _sides_if_any(self, *, is_refused: bool) -> list[Side]:
        try:
            return await self._sides()
        except SilentError:
            if is_refused:
                return []
            raise

    @staticmethod
    def _forget(host: Host, said: Said) -> None:
        if host.files is not None and host.files.run == said.run:
            host.files = None

    def _refused_for(self) -> Home | None:
        """stop._refused_for"""
        homes = [host.home for host in self._hosts if self.sees(host) and host.home is not None]
        if len(homes) != 1 or homes[0].claim is not None or homes[0].listed_replica is None:
            return None
        return homes[0]

    async def _settle_if_seen(self) -> None:
        try:
            await self._settle()
        except SilentError as exc:
            self.world.note(f"operator: {exc}")

    async def _primary_ended(self, host: Host, said: Said, *, is_dead: bool) -> bool:
        is_waiting = said.arbiter_fails
        if await self._ask_primary(host, "stop", ARBITER_S if is_waiting else TIMEOUT_S):
            return True
        now = await self._side_of(host)
        if now is None or not (now.answers and now.arbiter_fails):
            if is_waiting and await self._ask_primary(host, "stop", TIMEOUT_S):
                return True
            raise SilentError("the primary's service does not answer")
        await self._end_standby(host, is_dead=is_dead)
        is_certain = await self._require_nowhere_else(host, host.files, is_dead=is_dead)
        word = GO_ALONE if is_certain or "refuted" in self.world.without else GO_ALONE_UNLESS_TAKEN
        if not await self._ask_primary(host, word, TIMEOUT_S):
            raise SilentError("the primary's service does not answer")
        return host.files is not None and is_over_to_standby(host.files.word)

    async def _end_standby(self, primary: Host, *, is_dead: bool) -> None:
        files = primary.files
        if files is None:
            return
        standby = files.standby
        try:
            await self._reach(standby)
            for service in self._services(standby):
                service.kill()
            await end_waiting(self, standby)
            await self._reach(standby)
        except SilentError as exc:
            if not is_dead:
                raise _not_certain() from exc

    async def _require_nowhere_else(
        self, primary: Host, files: Files | None, *, is_dead: bool
    ) -> bool:
        """False: only the operator says so."""
        up, silent = await self._reached()
        others = [host for host in others_of(self._hosts, primary) if host in up]
        if any(other.home is not None for other in others):
            raise RefusedError("another host has it", FAILOVER)
        if any(self._services(other) for other in others):
            raise RefusedError("a standby is at work", WAIT, STOP)
        said = [host.files.word for host in up if host.files is not None]
        is_certain = not silent and not any(
            one is not None and one.state == PROMOTED and files is not None and one.run == files.run
            for one in said
        )
        if not (is_certain or is_dead):
            raise _not_certain()
        return is_certain

    async def _require_no_other_home(self, found: list[Side]) -> None:
        for host, said in found:
            if said.role != "primary" or not has_left(said) or (home := host.home) is None:
                continue
            files = host.files
            if files is not None and self.sees(files.standby):
                continue
            if home.claim is None:
                raise RefusedError("it was left to its standby, which may run it", STOP_OFF)
            right = await self._ask_about(host)
            if right is not Right.OURS:
                raise refused(right)

    async def _require_may_run(self, found: list[Side], *, is_dead: bool) -> Host | None:
        up, silent = await self._reached()
        homes = [host for host in up if host.home is not None]
        if len(homes) > 1:
            raise RefusedError("two hosts have it", WAIT, STOP)
        if not homes:
            return None
        host, roles = homes[0], {one: said.role for one, said in found}
        may_be_elsewhere = roles.get(host) == "standby" and silent
        if may_be_elsewhere and is_dead:
            return host if await self._has_its_term(host, homes[0].home) else None
        if (roles.get(host) != "primary" and not may_be_elsewhere) or host.home is None:
            return None
        if holder_of(host, host.home) is not None:
            home, before = host.home, host.home.claim
            right = await self._ask_about(host)
            if right is not Right.OURS:
                raise refused(right)
            if may_be_elsewhere and "asking" not in self.world.without:
                return host
            if home.claim == before:
                home.claim = None
        return None

    async def _has_its_term(self, host: Host, home: Home | None) -> bool:
        """stop._has_its_term"""
        if home is None or holder_of(host, home) is None or "dead" in self.world.without:
            return False
        try:
            return await self._ask_about(host) is Right.OURS
        except RefusedError:
            return False

    async def _settle_term(self, found: list[Side], *, is_dead: bool) -> None:
        words = [(host, host.files) for host, _ in found if host.files is not None]
        primaries = [one for one in words if one[1].role == "primary"]
        is_left = any(is_over_to_standby(files.word) for _, files in primaries)
        up, _ = await self._reached()
        homes = [host for host in up if host.home is not None]
        old = [host for host, _ in primaries]
        taken, is_failed = set[int](), False
        for host, files in words:
            if files.role != "standby":
                continue
            await self._reach(host)
            word = files.word
            await end_waiting(self, host)
            is_taken = word is not None and word.state == PROMOTED
            is_passed_on = any(home not in (*old, host, files.primary) for home in homes)
            is_of_no_use = word is None or (is_left and host.home is None and not is_taken)
            if is_of_no_use and not is_passed_on:
                is_failed = not await self._abandoned(host, files) or is_failed
            if is_taken and not is_dead:
                taken.add(files.run)
        up, _ = await self._reached()
        homes = [host for host in up if host.home is not None]
        for host, files in primaries:
            is_elsewhere = any(home is not host for home in homes)
            if not is_over_to_standby(files.word) or is_elsewhere or files.run in taken:
                continue
            await self._reach(host)
            if host.home is None and "nothing" not in self.world.without:
                continue
            is_gone = True
            try:
                await self._require_nowhere_else(host, files, is_dead=is_dead)
            except RefusedError:
                if is_failed:
                    raise
                is_gone = False
            release = Recovery(host, files, at_any_rate=True, standby_is_dead=is_gone)
            await self._while(lambda one=release: one.is_alive, "not taken back", WAIT, STOP_GONE)  # type: ignore[misc]
            if files.word is None:
                raise RefusedError("the term was not taken back", WAIT, STOP_GONE)
        if is_failed and not (primaries or homes):
            raise RefusedError("the term was not given up")

    async def _abandoned(self, host: Host, files: Files) -> bool:
        abandon, until_s = Abandon(host, files), self.world.now_s + ABANDON_S
        while abandon.is_alive:
            if self.world.now_s > until_s:
                abandon.end()
                return False
            await sleep(POLL_S)
        return True


def _not_certain() -> RefusedError:
    return RefusedError("where it may run is not certain", STOP_OFF, STOP_GONE)
