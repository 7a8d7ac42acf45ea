"""The operator's side of `start` for a libvirt domain: its own host says what it is."""

import json
from shlex import quote

from vmckpt.codec import builtins
from vmckpt.errors import NotFoundError, OperationFailedError, RefusedError, VmckptError
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host
from vmckpt.options.replication import ReplicationOptions
from vmckpt.preflight.finding import Finding, require
from vmckpt.preflight.replication.domains import checks_there
from vmckpt.replicate.domains.described import DescribedDomain, DomainQuestion, described_from
from vmckpt.replicate.domains.guest import forget, return_what_ended
from vmckpt.replicate.operator.begin import last_error, start
from vmckpt.replicate.request import as_itself
from vmckpt.replicate.status import ReplicationOutcome
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.monitor import TAINTED
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.inventory import Vm, read_home
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Qemu
from vmckpt.vm.spec.spec import parse_spec

_DESCRIBE_S, _MOST_BYTES = 60.0, 64 << 20


async def described(domain: Domain, options: ReplicationOptions) -> tuple[Vm, DescribedDomain]:
    """The domain as a VM, and what its host says of it.

    Raises RefusedError: it cannot be replicated; HostDownError, OperationFailedError.
    """
    asked = DomainQuestion(domain.uuid, as_itself(domain.host), options.holds_output)
    words = json.dumps(builtins(asked))
    command = [*await domain.host.own_command(), "replica-domain", words]
    done = await domain.host.run(command, _DESCRIBE_S)
    if done.returncode:
        raise _failed(domain, done.stderr, done.returncode)
    directory = vm_dir(domain.host.state_dir, domain.name)
    try:
        answer = described_from(parse(done.stdout, most_bytes=_MOST_BYTES))
        require(answer.findings, f"'{domain.name}' cannot be replicated")
        spec = parse_spec(answer.spec, str(directory.spec), directory.path)
        qemu = Qemu.from_json(answer.vm_json, directory)
        named = spec.name, qemu.domain, answer.domain and answer.domain.uuid
        if named != (domain.name, domain.uuid, domain.uuid):
            raise MalformedError("it is about another domain")
        images = {image.node_name for image in answer.images}
        if len(qemu.nodes) != len(spec.disks) or not images.issuperset(qemu.nodes):
            raise MalformedError("its disks are not among the images of its QEMU")
    except MalformedError as exc:
        raise OperationFailedError(
            f"what {domain.host.name} says of '{domain.name}' is malformed",
            why=str(exc),
            remedy="install the same vmckpt on all hosts",
        ) from exc
    return Vm(spec, domain.host, directory, qemu), answer


def _failed(domain: Domain, stderr: str, code: int) -> VmckptError:
    what = f"'{domain.name}' cannot be replicated"
    why, remedy = last_error(stderr)
    kind = RefusedError if code == RefusedError.exit_code else OperationFailedError
    return kind(what, why=why or "its host gave no answer", remedy=remedy or "see `vmckpt vm list`")


async def check_domain(
    vm: Vm, standby: Host, options: ReplicationOptions, answer: DescribedDomain
) -> list[Finding]:
    """Every check; changes nothing. Raises HostDownError."""
    images = {image.node_name: image for image in answer.images}
    return [*answer.findings, *await checks_there(vm, standby, options, images)]


async def forget_gone(standby: Host, vm: Vm) -> None:
    """Remove the standby's record of a domain that it once took over, and no longer has: it was
    moved or removed by libvirt's own means. Raises HostDownError; RefusedError: it is of another
    domain, which is in no libvirt.
    """
    known = await read_home(standby, vm.name)
    if known is None or not known.qemu.domain or standby.libvirt is None or await known.is_alive():
        return
    is_owed = await standby.exists(known.directory.undefined)
    if is_owed and known.qemu.domain != vm.qemu.domain:
        raise RefusedError(
            f"{standby.name} has another domain '{vm.name}', which no libvirt has",
            why=f"the replication of {known.qemu.domain} was interrupted, and has its definition",
            remedy=f"return it first: vmckpt replicate stop {quote(vm.name)}; and rename one",
        )
    if await standby.exists(known.directory.claim):  # the arbiter says whether it is stale
        return
    async with libvirtd(standby) as session:
        if await session.find(known.qemu.domain) is None:
            await forget(standby, vm.name)


async def start_domain(
    domain: Domain, standby: Host, options: ReplicationOptions, run: str
) -> ReplicationOutcome:
    """Have `standby` protect the domain. Raises as `start` does."""
    await return_what_ended(domain.host, domain.name)
    vm, answer = await described(domain, options)
    outcome = await start(vm, standby, options, run, answer)
    return outcome._replace(warnings=(TAINTED, *outcome.warnings))


async def home_of(domain: Domain) -> Vm:
    """The record of a domain that is replicated from its host, or was taken over there.

    Raises NotFoundError.
    """
    found = await read_home(domain.host, domain.name)
    if found is None or found.qemu.domain != domain.uuid:
        raise NotFoundError(
            f"'{domain.name}' was not taken over from another host",
            why=f"{domain.host.name} has no record of it",
            remedy=f"vmckpt replicate start {quote(domain.name)} HOST",
        )
    return found._replace(spec=found.spec._replace(heartbeat_id=domain.description.heartbeat_id))
