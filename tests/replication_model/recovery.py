"""What is done on a host beside the services: replicate/{claim,recovery,leftovers}.py."""

import math
from contextlib import suppress

from tests.replication_model.machine import Files, Home, Host
from tests.replication_model.process import POLL_S, Proc
from tests.replication_model.qemu import Guard, Qemu, QemuLostError
from tests.replication_model.world import sleep
from vmckpt.errors import OutcomeUnknownError, RefusedError, StorageError, VmckptError
from vmckpt.lease.lease import Lease
from vmckpt.lease.rule import Claimant, Holding, Right, right_of
from vmckpt.lease.store import ArbiterDownError
from vmckpt.replicate.arbiter import ARBITER_S
from vmckpt.replicate.primary.keeper import GIVEN_UP_S, MARGIN_S
from vmckpt.replicate.status import PROMOTED

NO_ANSWER = (ArbiterDownError, OutcomeUnknownError, StorageError)


def holder_of(host: Host, home: Home) -> str | None:
    """Whom the home there has its term by: of its claim, or the standby that took over."""
    files = host.files
    if home.claim is None and took_over(host) and files is not None:
        return f"{host.name}/{files.run}"
    return home.claim


def took_over(host: Host) -> bool:
    """claim.took_over"""
    return (
        host.files is not None
        and host.files.role == "standby"
        and host.home is not None
        and (host.home.run == host.files.run or "came" in host.world.without)
        and "twin" not in host.world.without
    )


async def ask_about(host: Host, home: Home) -> Right:
    """claim.examine: what the arbiter says of the claim. Raises as it does."""
    found = await host.read("web")
    holder = holder_of(host, home) or ""
    standby = host.world.standbys.get(holder, "nobody/0")
    if found is not None and home.claim is None and found.record.holder == anew(host):
        holder = anew(host)
    return right_of(found.record if found else None, holder, standby)


def anew(host: Host) -> str:
    """claim._anew"""
    return f"{host.name}/after-{host.files.run if host.files is not None else 0}"


async def take_anew(host: Host) -> None:
    """claim.take_anew"""
    found, files = await host.read("web"), host.files
    if found is None or files is None or found.record.holder == anew(host):
        return
    holder = found.record.holder
    claimant = Claimant(anew(host), succeeds=holder if files.is_standbys(holder) else None)
    await host.lease(claimant).take(Holding(found.record.term, holder))


def remove_stale_home(host: Host, qemu_id: int) -> None:
    """leftovers.remove_stale_home"""
    home = host.home
    if home is None or home.id != qemu_id:
        return
    if (qemu := host.qemu_of(home)) is not None:
        qemu.end()
    host.home = None
    host.world.note(f"what {host.name} has is stale, and removed")


class Recovery(Proc):
    """recovery.recover: after the death of the primary's service, or for `replicate stop`."""

    def __init__(
        self,
        host: Host,
        files: Files,
        *,
        at_any_rate: bool = False,
        standby_is_dead: bool = False,
    ) -> None:
        super().__init__(host)
        self._files, self.at_any_rate, self._is_dead = files, at_any_rate, standby_is_dead
        self.said = at_any_rate + standby_is_dead
        self.frees_at_last = at_any_rate and standby_is_dead
        self.begin(self._recover())

    async def _recover(self) -> None:
        while not self.has_lock(self.host):
            await sleep(POLL_S)
        try:
            await self._settle()
        except RefusedError as exc:
            self.world.note(f"recovery on {self.host.name}: {exc.what}")
        self.end()

    async def _settle(self) -> None:
        host, files = self.host, self._files
        if not self._is_going_on():
            return
        home = host.home
        if not (self.at_any_rate or host.qemu_of(home) is not None):
            return
        if self.at_any_rate and home is not None and await self._had_no_term(home):
            self.world.count(f"recovery on {host.name}: had no term")
            files.word = files.say("ended", ending="stopped")
            return
        goes_on = await self._takes_term()
        if goes_on is None:
            self.world.count(f"recovery on {host.name}: left to the operator")
            return
        if goes_on:
            ending = "off"
            home = host.home
            if home is not None:
                home.claim = None
                for guard in host.find(Guard):
                    guard.end()
                qemu = host.qemu_of(home)
                if qemu is not None and await _freed(qemu):
                    ending = "alone"
        else:
            if (qemu := host.qemu_of(host.home)) is not None and qemu.id == files.primary_id:
                qemu.end()  # its home stays: no one here knows whether the standby has the guest
            ending = "replaced"
        self.world.count(f"recovery on {host.name}: {ending}")
        files.word = files.say("ended", ending=ending)

    async def _had_no_term(self, home: Home) -> bool:
        """recovery._had_no_term"""
        if home.claim is not None or "term" in self.world.without:
            return False
        try:
            found = await self.host.read("web")
        except NO_ANSWER:
            return False
        if found is None:
            return False
        holder = found.record.holder
        return not (holder.startswith(f"{self.host.name}/") or self._files.is_standbys(holder))

    def _is_left_to_others(self) -> bool:
        """recovery._is_left_to_others"""
        is_said = any(one.said > self.said for one in _others(self))
        return not self._is_dead and (is_said or not self._is_going_on())

    def _is_going_on(self) -> bool:
        """recovery._is_going_on"""
        word = self._files.word
        is_over = word is not None and word.ending not in ("yours", "replaced")
        return self.host.files is self._files and not (self.at_any_rate and is_over)

    def _note_replica(self) -> None:
        if self.host.home is not None:
            self.host.home.gone_replica = f"{self._files.standby.name}/{self._files.run}"

    async def _takes_term(self) -> bool | None:  # noqa: C901, PLR0912 - as the product has it
        """recovery._takes_term"""
        host, files, world = self.host, self._files, self.world
        us = f"{host.name}/"
        claimant = f"{us}{files.run}/recovery"
        lease: Lease | None = None
        until_s, answered_s = math.inf, world.now_s
        while True:
            if self._is_left_to_others():
                return None
            if self._is_dead and world.now_s - answered_s > ARBITER_S:
                self._note_replica()
                return True
            try:
                found = await host.read("web")
                if found is None:
                    if self.at_any_rate:
                        if not self._is_dead and host.home is not None and host.home.claim:
                            raise _not_ours("nobody")
                        if self._is_dead:
                            self._note_replica()
                        return True
                elif (holder := found.record.holder) == claimant:
                    break
                elif files.is_standbys(holder) and not (found.record.released or self._is_dead):
                    until_s = min(until_s, world.now_s + GIVEN_UP_S)
                    if world.now_s > until_s:
                        return False
                elif not (holder.startswith(us) or files.is_standbys(holder)):
                    raise _not_ours(holder)
                else:
                    if lease is None or lease.claimant.succeeds != holder:
                        lease = host.lease(Claimant(claimant, succeeds=holder))
                    if await _got(lease):
                        break
                answered_s = world.now_s
            except NO_ANSWER:
                pass
            await sleep(POLL_S)
        if host.home is not None:
            host.home.gone_replica = None
        return True


async def _freed(qemu: Qemu) -> bool:
    """recovery._free; False: it has ended."""
    qemu.set(is_sigstopped=False)
    try:
        await qemu.ask(lambda: qemu.set(is_held=False, runs=True))
    except QemuLostError:
        return False
    return True


def _others(recovery: Recovery) -> list[Recovery]:
    return [one for one in recovery.host.procs if isinstance(one, Recovery) and one is not recovery]


def _not_ours(holder: str) -> RefusedError:
    return RefusedError(f"{holder} holds it", why="-", remedy="-")


async def _got(lease: Lease) -> bool:
    try:
        await lease.take()
    except RefusedError:
        return False
    return True


async def end_waiting(proc: Proc, host: Host) -> bool:
    """leftovers.end_waiting, by `proc`, which takes the lock there; False: another has it."""
    until_s = proc.world.now_s + 30.0
    while not proc.has_lock(host):
        if proc.world.now_s > until_s:
            return False
        await sleep(POLL_S)
    if host.home is None:
        for qemu in host.qemus:
            qemu.end()
    proc.let_go(host)
    return True


class Abandon(Proc):
    """recovery.abandon: after the death of the standby's service."""

    def __init__(self, host: Host, files: Files) -> None:
        super().__init__(host)
        self._files = files
        self.begin(self._abandon())

    async def _abandon(self) -> None:
        host = self.host
        if await end_waiting(self, host):
            if host.home is None:
                await give_up_term(host, self._files)
            elif (qemu := host.qemu_of(host.home)) is not None and (
                qemu.runs or await self._run_again(qemu)
            ):
                self._note_taken_over()
        self.end()

    def _note_taken_over(self) -> None:
        """recovery._note_taken_over"""
        home, files = self.host.home, self._files
        old = files.primary.name, files.primary_id
        if home is not None and home.replaces == old and files.word is None:
            files.word = files.say(PROMOTED, qemu_id=home.id)

    async def _run_again(self, qemu: Qemu) -> bool:
        """recovery._runs_again"""
        host, files = self.host, self._files
        while (lease := await _taken_again(host, files)) is not None:
            if host.clock() + MARGIN_S < lease.held_until_s:
                with suppress(QemuLostError):
                    await qemu.ask(qemu.cont)
                return True
        with suppress(VmckptError):
            found = await host.read("web")
            if found is not None and not files.is_standbys(found.record.holder):
                remove_stale_home(host, qemu.id)
        return False


async def give_up_term(host: Host, files: Files) -> None:
    """recovery.give_up_term"""
    while (lease := await _taken_again(host, files)) is not None:
        with suppress(VmckptError):
            await lease.give_up()
            return
        await sleep(POLL_S)


async def _taken_again(host: Host, files: Files) -> Lease | None:
    """recovery._taken_again"""
    ended, world = f"{files.standby.name}/{files.run}", host.world
    unknown_until_s = math.inf
    while host.files is files:
        with suppress(VmckptError):
            found = await host.read("web")
            if found is None:
                unknown_until_s = min(unknown_until_s, world.now_s + GIVEN_UP_S)
                if world.now_s > unknown_until_s:
                    return None
            elif found.record.released or not files.is_standbys(found.record.holder):
                return None
            else:
                term, holder = found.record.term, found.record.holder
                lease = host.lease(Claimant(f"{ended}/abandon/{term}", succeeds=holder))
                await lease.take(Holding(term, holder))
                return lease
        await sleep(POLL_S)
    return None
