"""What an operator's commands ask hosts: `operator/sides.py`, the finding of a VM, `settle`."""

from collections.abc import Callable, Sequence

from tests.replication_model.machine import Host, Said
from tests.replication_model.primary import Primary
from tests.replication_model.process import POLL_S, Proc
from tests.replication_model.qemu import Qemu
from tests.replication_model.recovery import (
    NO_ANSWER,
    Recovery,
    ask_about,
    holder_of,
    remove_stale_home,
)
from tests.replication_model.standby import Standby
from tests.replication_model.world import sleep
from vmckpt.lease.rule import Right
from vmckpt.replicate.control import STATUS_TIMEOUT_S
from vmckpt.replicate.operator.sides import BEGIN_S
from vmckpt.replicate.status import DEAD, PROMOTED

START, PROTECT, FAILOVER, STOP, WAIT = "start", "protect", "failover", "stop", "wait"
# `stop --standby-is-dead`: said when its host is off, or only when it is off for good.
STOP_OFF, STOP_GONE = "stop, standby is off", "stop, standby is gone"
# `failover --primary-is-dead`: the arbiter is gone for good, and no host is off that may be back.
FAILOVER_DEAD = "failover, primary is dead"
# `migrate`, also of a VM that is off.
MOVE = "move"
# `keep`, with the hosts of its act, or all; its time is its window's length, 0: it has none.
KEEP = "keep"


class RefusedError(Exception):
    """A command's error, and the commands that it names as its remedy."""

    def __init__(self, why: str, *remedies: str) -> None:
        super().__init__(why)
        self.remedies = remedies or (WAIT,)


class SilentError(RefusedError):
    """HostDownError"""


Side = tuple[Host, Said]


class Asking(Proc):
    """A command, which runs on the operator's machine."""

    def __init__(self, desk: Host, hosts: tuple[Host, ...]) -> None:
        super().__init__(desk)
        self._hosts = hosts

    def sees(self, host: Host) -> bool:
        """Whether that host answers it."""
        return host.answers

    async def _reach(self, host: Host) -> None:
        await sleep(0.03)
        if not self.sees(host):
            raise SilentError(f"{host.name} does not answer")

    async def _reached(self) -> tuple[list[Host], list[Host]]:
        await sleep(0.03)
        up = [host for host in self._hosts if self.sees(host)]
        return up, [host for host in self._hosts if host not in up]

    # -- sides -----------------------------------------------------------------------------------

    async def _sides(self) -> list[Side]:
        up, silent = await self._reached()
        found = [(host, said) for host in up if (said := await self._side_of(host)) is not None]
        if not found and silent:
            raise SilentError("only a host that does not answer may know of it")
        return sorted(found, key=lambda side: side[1].role)

    async def _side_of(self, host: Host) -> Said | None:
        files = host.files
        if files is None:
            return None
        service = files.service
        if isinstance(service, Primary | Standby) and service.is_alive and service.has_ear:
            if service.is_frozen:
                await sleep(STATUS_TIMEOUT_S)
            if service.works() and self.sees(host):
                return service.status()
        if files.word is not None:
            return files.word
        return files.say("silent" if service is not None and service.is_alive else DEAD)

    @staticmethod
    def _services(host: Host) -> list[Proc]:
        return [proc for proc in host.procs if isinstance(proc, Primary | Standby)]

    async def _until_gone(self, host: Host, again: Callable[[Proc], None] | None = None) -> None:
        until_s = self.world.now_s + BEGIN_S
        await self._reach(host)
        while left := self._services(host):
            for service in left:
                if again is not None and not service.is_frozen:
                    again(service)
                if self.world.now_s > until_s:
                    service.kill()
            await sleep(POLL_S)
            await self._reach(host)

    async def _while(self, there_is: Callable[[], bool], late: str, *remedies: str) -> None:
        until_s = self.world.now_s + BEGIN_S
        while there_is():
            if self.world.now_s > until_s:
                raise RefusedError(late, *remedies)
            await sleep(POLL_S)

    # -- where the VM is ---------------------------------------------------------------------------

    async def _find(self) -> Host:
        """drivers.find: the host where the VM is at home."""
        up, silent = await self._reached()
        homes = [host for host in up if host.home is not None]
        if not homes and silent:
            raise SilentError("it is on none of the hosts that answer")
        if not homes:
            raise RefusedError("there is no such VM", "none")
        if len(homes) > 1:
            await self._settle()
            homes = [host for host in up if self.sees(host) and host.home is not None]
            if len(homes) != 1:
                raise RefusedError("two hosts have it", "none")
        return homes[0]

    async def _settle(self) -> bool:
        """operate.settle"""
        up, _ = await self._reached()
        for host in up:
            if (home := host.home) is None or home.replaces is None:
                continue
            for other in up:
                old = other.home
                if old is None or home.replaces != (other.name, old.id):
                    continue
                if _remove_taken_over(other, old.id, host):
                    return True
        is_settled = await self._settled_by_sides()
        return await self._settled_by_claims() or is_settled

    async def _settled_by_sides(self) -> bool:
        for host, said in await self._sides():
            if said.role != "standby" or said.state != PROMOTED or not is_at_home(host, said):
                continue
            for other in self._hosts:
                if other.name == said.primary and other is not host:
                    await self._reach(other)
                    if not _remove_taken_over(other, said.primary_id, host):
                        break
            else:
                return True
        return False

    async def _settled_by_claims(self) -> bool:
        """operate._settled_by_claims"""
        up, _ = await self._reached()
        homes = [(host, host.home) for host in up if host.home is not None]
        if len(homes) < 2:
            return False
        stale = [
            (host, home)
            for host, home in homes
            if holder_of(host, home) and await self._ask_about(host) is Right.ELSEWHERE
        ]
        if len(stale) == len(homes):
            return False
        for host, home in stale:
            remove_stale_home(host, home.id)
        return bool(stale)

    async def _ask_about(self, host: Host) -> Right:
        await self._reach(host)
        if host.home is None:
            raise RefusedError("it is no longer there", START)
        try:
            return await ask_about(host, host.home)
        except NO_ANSWER as exc:
            stop = (STOP,) if self.world.is_arbiter_lost else ()
            raise RefusedError("the arbiter does not answer", WAIT, *stop, STOP_GONE) from exc

    # -- the primary's service ---------------------------------------------------------------------

    async def _ask_primary(self, host: Host, word: str, at_most_s: float) -> bool:
        """Whether its service has done it in that time."""
        files, until_s = host.files, self.world.now_s + at_most_s
        if files is None or not isinstance(service := files.service, Primary):
            return False
        if not (service.is_alive and service.has_ear):
            return False
        service.later(0.0, service.answer, word)
        while self.world.now_s < until_s and self.sees(host):
            await sleep(POLL_S)
            if files.word is not None or service not in host.procs:
                break
        return files.word is not None


def boot(host: Host) -> Qemu:
    """Start the VM that is at home there, from its disk."""
    home = host.home
    if home is None:
        raise RuntimeError("no VM is at home there")
    qemu = Qemu(host, host.world.fork(home.disk), home)
    home.id, home.replaces, home.disk = qemu.id, None, qemu.state
    qemu.cont()
    host.world.count("booted")
    return qemu


def tell_primary(service: Proc, word: str) -> None:
    if isinstance(service, Primary) and service.has_ear:
        service.later(0.0, service.answer, word)


def dismiss(service: Proc) -> None:
    if isinstance(service, Standby) and service.has_ear:
        service.later(0.0, service.dismiss)


def refused(right: Right) -> RefusedError:
    if right is Right.PENDING:
        return RefusedError(right, FAILOVER, STOP, STOP_OFF)
    return RefusedError(right, WAIT, STOP, STOP_GONE)


def has_left(said: Said) -> bool:
    return said.ending in ("yours", "replaced")


def is_over_to_standby(word: Said | None) -> bool:
    return word is None or has_left(word)


def is_of_home(host: Host) -> bool:
    """claim.is_of_this_home"""
    home, files = host.home, host.files
    if home is None:
        return False
    return home.claim is not None or (files is not None and files.primary_id == home.id)


def is_at_home(host: Host, said: Said) -> bool:
    return host.home is not None and host.home.id == said.qemu_id


def runs(host: Host) -> bool:
    qemu = host.qemu_of(host.home)
    return qemu is not None and qemu.runs


def others_of(hosts: Sequence[Host], host: Host) -> list[Host]:
    return [one for one in hosts if one is not host]


def _remove_taken_over(host: Host, qemu_id: int, standby: Host) -> bool:
    """leftovers.remove_taken_over"""
    home, files = host.home, host.files
    if home is None or home.id != qemu_id:
        return True
    if home.claim is not None:
        is_its = host.world.standbys.get(home.claim, "").partition("/")[0] == standby.name
    else:
        is_its = (
            files is not None
            and files.primary_id == home.id
            and ((files.primary, files.standby) == (host, standby))
        )
    is_given = any(isinstance(one, Recovery) and one.frees_at_last for one in host.procs)
    if not is_its or is_given or (_was_given_term(host) and not _took_alone(standby)):
        return False
    remove_stale_home(host, qemu_id)
    return True


def _was_given_term(host: Host) -> bool:
    """claim.was_given_term"""
    home, files = host.home, host.files
    if home is None or home.gone_replica or files is None or "given" in host.world.without:
        return False
    word = files.word
    is_its = files.primary_id == home.id
    return is_its and word is not None and word.ending in ("alone", "off")


def _took_alone(standby: Host) -> bool:
    return standby.home is not None and standby.home.gone_replica is not None
