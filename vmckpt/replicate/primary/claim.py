"""A primary's claim on its guest, in the VM's own directory: a fencing token.

The primary's service writes it before a replica may take over, and removes it once the arbiter has
recorded that none may. While it exists, the guest is started from this host's disks only if the
arbiter confirms that no other host has it, regardless of services, their files and other hosts. It
is removed with the VM's directory: a VM that arrives here later has none. For a VM that a standby
took over, its service's files have the same role.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import HostDownError, OperationFailedError, RefusedError, StorageError
from vmckpt.foreign import parse
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseSpan
from vmckpt.lease.rule import Claimant, Holding, Right, right_of
from vmckpt.options.replication import ReplicationOptions
from vmckpt.replicate.arbiter import open_arbiter
from vmckpt.replicate.operator.sides import last_status
from vmckpt.replicate.request import (
    REQUEST,
    ReplicationRequest,
    ServiceFiles,
    read_request,
)
from vmckpt.state.documents import Schema, load_from
from vmckpt.state.durable import write_durably
from vmckpt.vm.inventory import Vm
from vmckpt.vm.record import Replaced

ASK_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Claim:
    """Who ran the guest here (`holder`, a service's name with the arbiter), and whom to ask."""

    vm: str
    holder: str
    standby: str
    arbiter: str
    credentials: str = ""

    @property
    def other(self) -> str:
        """The name with the arbiter of the other side's service in the same run."""
        return f"{self.standby}/{self.holder.partition('/')[2]}"

    def write(self, path: Path) -> None:
        """Write it on this host. Raises StorageError."""
        write_durably(path, _SCHEMA.encode(self))

    @staticmethod
    def read(path: Path) -> "Claim":
        """Read it. Raises StorageError if it is damaged or of another version."""
        try:
            return _SCHEMA.decode(path.read_bytes(), path)
        except OSError as exc:
            raise _SCHEMA.damaged(path, str(exc)) from exc

    @staticmethod
    async def of(vm: Vm) -> "Claim | None":
        """The claim in the VM's directory, on any host. Raises as `read`, HostDownError."""
        return await load_from(vm.host, vm.directory.claim, _SCHEMA)


_SCHEMA = Schema(Claim, "make sure that no other host runs the VM, then remove this file")


class ClaimAnswer(NamedTuple):
    """The arbiter's answer about a claim: the right, and who holds the term now."""

    right: Right
    holder: str
    standby: str


def _of_standby(request: ReplicationRequest) -> Claim:
    """The record by which a standby that took over has the guest: an operator may have let the term
    be taken from it while its host was off.
    """
    holder, options = request.replica, request.options
    return Claim(request.vm, holder, request.primary.name, options.arbiter, options.credentials)


def _anew(request: ReplicationRequest) -> str:
    """The host of a standby that took over, by its name with the arbiter after `take_anew`."""
    return f"{request.standby.name}/after-{request.run}"


async def take_anew(directory: Path) -> None:
    """The host of the standby that took over, which has this directory, takes the VM's next term.

    An operator may give the standby's term to the older home while this host is off; without the
    directory this home would not ask. Raises RefusedError (another holds the term), and as the
    arbiter does.
    """
    request = read_request(directory)
    store, name = open_arbiter(request.options), _anew(request)
    found = await store.read(request.vm)
    if found is None or found.record.holder == name:
        return
    holder = found.record.holder
    claimant = Claimant(name, succeeds=holder if request.is_standbys(holder) else None)
    lease = Lease(store, request.vm, claimant, LeaseSpan(request.options.lease_s))
    await lease.take(Holding(found.record.term, holder))


async def take_anew_there(vm: Vm) -> None:
    """Like `take_anew`, on the VM's host.

    Raises OperationFailedError: the standby's files must stay.
    """
    path = ServiceFiles.of(vm.host, vm.name).path
    command = [*await vm.host.own_command(), "replica", "anew", str(path)]
    done = await vm.host.run(command, ASK_TIMEOUT_S)
    if done.returncode:
        raise OperationFailedError(
            f"'{vm.name}' cannot be protected",
            why="; ".join(done.stderr.strip().splitlines()[-3:]) or f"exit {done.returncode}",
            remedy="restore access to the arbiter, and try again; the VM keeps running",
        )


async def examine(path: Path) -> ClaimAnswer:
    """Ask the arbiter about the claim at `path`, or the standby that has this directory, on its own
    host. Raises as the arbiter does.
    """
    request = read_request(path) if path.is_dir() else None
    claim = _of_standby(request) if request is not None else Claim.read(path)
    found = await open_arbiter(
        ReplicationOptions(claim.arbiter, credentials=claim.credentials)
    ).read(claim.vm)
    record = found.record if found else None
    holder = record.holder if record else ""
    ours = _anew(request) if request is not None and holder == _anew(request) else claim.holder
    return ClaimAnswer(right_of(record, ours, claim.other), holder, claim.standby)


async def ask_about(vm: Vm) -> ClaimAnswer | None:
    """The arbiter's answer about the VM's claim, or about the takeover there.

    None: there is neither. If the claim could not be removed when the primary's service ended, the
    arbiter is not asked again about what it had recorded then. Raises HostDownError when it does
    not answer: then nothing may be started.
    """
    path = vm.directory.claim
    if not await vm.host.exists(path):
        if not await took_over(vm):
            return None
        path = ServiceFiles.of(vm.host, vm.name).path
    elif answer := await _was_settled(vm):
        return answer
    command = [*await vm.host.own_command(), "replica", "examine", str(path)]
    done = await vm.host.run(command, ASK_TIMEOUT_S)
    try:
        if done.returncode:
            raise ValueError("; ".join(done.stderr.strip().splitlines()[-3:]) or "no answer")
        words = parse(done.stdout)
        return ClaimAnswer(Right[words["right"]], str(words["holder"]), str(words["standby"]))
    except (ValueError, KeyError, TypeError) as exc:
        raise HostDownError(
            f"cannot tell whether another host runs '{vm.name}'",
            why=f"{vm.host.name} was a host of its replication; the arbiter does not answer: {exc}",
            remedy="bring the arbiter back; if it is gone for good: vmckpt replicate stop "
            f"{vm.name} (with --standby-is-dead if the other host is off, too)",
        ) from exc


async def _was_settled(vm: Vm) -> ClaimAnswer | None:
    """The answer to a claim whose service has ended, with nothing left to a standby."""
    with suppress(StorageError):
        claim = await Claim.of(vm)
        status = await last_status(vm.host, ServiceFiles.of(vm.host, vm.name))
        if claim is None or status is None:
            return None
        is_its = claim.holder == f"{vm.host.name}/{status.run}"
        if is_its and status.is_primary and status.is_settled:
            return ClaimAnswer(Right.OURS, claim.holder, claim.standby)
    return None


async def is_of_this_home(vm: Vm) -> bool:
    """Whether the replication that its host knows was of this home, not of an earlier one."""
    if await vm.host.exists(vm.directory.claim):
        return True
    try:
        request = await _request_there(vm)
    except StorageError:
        return True  # of another version: better one refusal too many
    return request is not None and request.qemu_id == vm.qemu.files.qemu_id


async def was_protected_by(vm: Vm, standby: str) -> bool:
    """Whether that standby protected this home, by its own host's records.

    If not, what that host says of it does not count: it could otherwise have any VM ended. Raises
    StorageError, HostDownError.
    """
    claim = await Claim.of(vm)
    if claim is not None:
        return claim.standby == standby
    with suppress(StorageError):  # of another version, which made a claim
        request = await _request_there(vm)
        return (
            request is not None
            and (request.primary.name, request.standby.name) == (vm.host.name, standby)
            and request.qemu_id == vm.qemu.files.qemu_id
        )
    return False


async def was_given_term(vm: Vm) -> bool:
    """Whether the arbiter gave this home the term for good when its protection ended, by its own
    host's records: an operator may have declared dead a standby that had taken over.

    False if it was freed without the arbiter. A QEMU that was "lost" may have been taken over
    since. Raises HostDownError.
    """
    if await vm.host.exists(vm.directory.gone_replica):
        return False
    with suppress(StorageError):
        request = await _request_there(vm)
        status = await last_status(vm.host, ServiceFiles.of(vm.host, vm.name))
        if request is not None and status is not None:
            is_its = (status.run, vm.qemu.files.qemu_id) == (request.run, request.qemu_id)
            return is_its and status.is_primary and status.ending in ("alone", "off")
    return False


async def took_over(vm: Vm) -> bool:
    """Whether its host has it at home as the standby that took over, whatever was done with it here
    since; not if it came there in another way, after a replication that its host had been for.
    """
    with suppress(StorageError):
        request = await _request_there(vm)
        if request is None or request.standby.name != vm.host.name:
            return False
        return await vm.host.read_text(vm.directory.taken_over) == request.run
    return False


async def is_as_taken_over(vm: Vm) -> bool:
    """Whether that is so, and its QEMU is still the one that took over."""
    with suppress(StorageError):
        request = await _request_there(vm)
        return (
            request is not None
            and request.standby.name == vm.host.name
            and vm.qemu.replaces == Replaced(request.primary.name, request.qemu_id)
        )
    return False


async def _request_there(vm: Vm) -> ReplicationRequest | None:
    """The request of the replication that its host knows. Raises StorageError, also for another
    version's.
    """
    return await load_from(vm.host, ServiceFiles.of(vm.host, vm.name).request, REQUEST)


async def require_right(vm: Vm) -> None:
    """Return if the guest may run on its host, and remove its claim, if any.

    Raises RefusedError (another host has it, or may take it), HostDownError (no answer).
    """
    before = await vm.host.read_text(vm.directory.claim)
    answer = await ask_about(vm)
    if answer is None:
        return
    if answer.right is Right.OURS:
        await drop_claim(vm, before)
        return
    raise refused(vm, answer)


async def drop_claim(vm: Vm, before: str | None) -> None:
    """Remove its claim, which was this `before` the arbiter was asked; not that of a protection
    which has begun since.
    """
    if before is not None and await vm.host.read_text(vm.directory.claim) == before:
        await vm.host.remove(vm.directory.claim)


def refused(vm: Vm, answer: ClaimAnswer) -> RefusedError:
    """The error for a guest that may not run on this host."""
    stop = f"vmckpt replicate stop {vm.name}"
    if answer.right is Right.PENDING:
        return RefusedError(
            f"{answer.standby} may take '{vm.name}' over at any moment",
            why=f"its protection from {vm.host.name} ended, and the arbiter has no record of that",
            remedy=f"vmckpt replicate failover {vm.name}; if the standby is gone for good: {stop}"
            " (with --standby-is-dead if its host is off)",
        )
    why = f"the arbiter granted the term to {answer.holder}"
    if answer.right is Right.FORGOTTEN:
        why = "the arbiter has no record of it: its directory may not be mounted"
    return RefusedError(
        f"'{vm.name}' may run on {answer.standby}",
        why=f"{why}; the state on {vm.host.name} is older",
        remedy=f"see `vmckpt vm list`; if no other host has it: {stop}. If that host is off for "
        f"good, and the older state here is wanted: {stop} --standby-is-dead, then start it",
    )
