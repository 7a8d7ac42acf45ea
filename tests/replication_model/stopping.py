"""`replicate stop`, as replicate/stop.py."""

from tests.replication_model.asking import (
    FAILOVER,
    PROTECT,
    STOP_OFF,
    Asking,
    RefusedError,
    Side,
    SilentError,
    has_left,
    is_over_to_standby,
    other_of,
    refused,
)
from tests.replication_model.machine import Host, Said
from tests.replication_model.recovery import Abandon, Recovery, end_waiting, holder_of
from vmckpt.lease.rule import Right
from vmckpt.replicate.control import GO_ALONE, TIMEOUT_S
from vmckpt.replicate.request import PROMOTED
from vmckpt.replicate.stop import ARBITER_S


class Stopping(Asking):
    """One that may end a protection."""

    async def _stop(self, *, is_dead: bool) -> None:
        """stop.stop"""
        found = await self._sides()
        if not found:
            raise RefusedError("it is not replicated", PROTECT)
        answering = {said.role for _, said in found if said.answers}
        if "standby" in answering and "primary" not in answering:
            raise RefusedError("the standby may have the only copy of the guest", FAILOVER)
        has_arbiter = True
        for host, said in found:
            if said.answers and said.role == "primary":
                has_arbiter = await self._primary_ended(host, said, is_dead=is_dead)
        for host, _ in found:
            await self._until_gone(host)
        if not (is_dead or any(said.role == "standby" for _, said in found)):
            await self._require_no_other_home(found)
        if has_arbiter:
            await self._settle_term(found, is_dead=is_dead)
        try:
            await self._settle()
        except SilentError as exc:
            self.world.note(f"operator: {exc}")
        await self._require_may_run(found, is_dead=is_dead)
        for host, _ in found:
            await self._reach(host)
            host.files = None

    async def _primary_ended(self, host: Host, said: Said, *, is_dead: bool) -> bool:
        is_waiting = said.arbiter_fails
        if await self._ask_primary(host, "stop", ARBITER_S if is_waiting else TIMEOUT_S):
            return True
        now = await self._side_of(host)
        if now is None or not (now.answers and now.arbiter_fails):
            if is_waiting and await self._ask_primary(host, "stop", TIMEOUT_S):
                return True
            raise SilentError("the primary's service does not answer")
        if not is_dead:
            await self._end_standby(host)
        if not await self._ask_primary(host, GO_ALONE, TIMEOUT_S):
            raise SilentError("the primary's service does not answer")
        return False

    async def _end_standby(self, primary: Host) -> None:
        standby = other_of(self._hosts, primary)
        try:
            await self._reach(standby)
            for service in self._services(standby):
                service.kill()
            await end_waiting(self, standby)
            await self._reach(standby)
        except SilentError as exc:
            raise RefusedError("where it may run is not certain", STOP_OFF) from exc
        if standby.home is not None:
            raise RefusedError("the standby has it", FAILOVER)

    async def _require_no_other_home(self, found: list[Side]) -> None:
        for host, said in found:
            if said.role != "primary" or not has_left(said) or (home := host.home) is None:
                continue
            if other_of(self._hosts, host).answers:
                continue
            if home.claim is None:
                raise RefusedError("it was left to its standby, which may run it", STOP_OFF)
            right = await self._ask_about(host)
            if right is not Right.OURS:
                raise refused(right)

    async def _require_may_run(self, found: list[Side], *, is_dead: bool) -> None:
        up, silent = await self._reached()
        homes = [host for host in up if host.home is not None]
        if len(homes) != 1:
            return
        host, roles = homes[0], {one: said.role for one, said in found}
        may_be_elsewhere = roles.get(host) == "standby" and silent and not is_dead
        if (roles.get(host) != "primary" and not may_be_elsewhere) or host.home is None:
            return
        if holder_of(host, host.home) is not None:
            right = await self._ask_about(host)
            if right is not Right.OURS:
                raise refused(right)

    async def _settle_term(self, found: list[Side], *, is_dead: bool) -> None:
        primaries = {host for host, said in found if said.role == "primary"}
        up, _ = await self._reached()
        has_it = not is_dead and any(host.home is not None and host not in primaries for host in up)
        words = [(host, host.files) for host, _ in found if host.files is not None]
        is_left = any(
            files.role == "primary" and is_over_to_standby(files.word) for _, files in words
        )
        for host, files in sorted(words, key=lambda word: word[1].role == "primary"):
            await self._reach(host)
            word = files.word
            if files.role == "standby":
                await end_waiting(self, host)
                has_it = host.home is not None or (word is not None and word.state == PROMOTED)
                if word is None or (is_left and not has_it):
                    abandon = Abandon(host, files)
                    await self._while(lambda one=abandon: one.is_alive, "it is not given up")  # type: ignore[misc]
            elif word is None or (is_over_to_standby(word) and not has_it):
                release = Recovery(host, files, at_any_rate=True, standby_is_dead=is_dead)
                await self._while(lambda one=release: one.is_alive, "it is not taken back")  # type: ignore[misc]
                if files.word is None:
                    raise RefusedError("the term was not taken back")
