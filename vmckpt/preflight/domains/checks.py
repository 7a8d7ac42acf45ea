"""Every reason why a domain cannot be migrated, found before anything is changed."""

import math
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.options.migration import Method, MigrationOptions, Tls
from vmckpt.options.reading import UNLIMITED_DOWNTIME_MS
from vmckpt.preflight import destination_host
from vmckpt.preflight.domains import destination_libvirt
from vmckpt.preflight.domains.arrival import arrival_checks, arriving, disks_elsewhere
from vmckpt.preflight.domains.certificates import (
    CLIENT_FILES,
    SERVER_FILES,
    certificate_dir_of,
    qemu_user,
    qemu_users,
    unreadable,
)
from vmckpt.preflight.domains.disks import DomainDisks, plan_domain_disks
from vmckpt.preflight.domains.link import find_link
from vmckpt.preflight.domains.options import client_checks, option_checks, sample_s
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding, ask, refusal, require
from vmckpt.preflight.migration import dirty_log
from vmckpt.preflight.migration.disks import DiskCopy, disk_checks
from vmckpt.preflight.migration.encryption import UNENCRYPTED, Encryption, Scheme, choose
from vmckpt.preflight.migration.method import (
    copy_checks,
    encryption_checks,
    postcopy_risk,
    resolve_method,
)
from vmckpt.qemu.replies import QemuVersion
from vmckpt.sequence.steps import all_of, both
from vmckpt.units import MIB
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.paths import lock_path

# Zeroes written to a copied disk become holes.
DETECTS_ZEROES = (10, 9, 0)
# The versions of both libvirts, and of the source's QEMU, needed to hold QEMU back.
HOLD_SINCE_LIBVIRT, HOLD_SINCE_QEMU = (11, 1, 0), QemuVersion(8, 2, 0)

DETACH = (
    "detach it (virsh detach-device); only a VM from a spec of vmckpt's has [[passthrough]] devices"
    ", which go by strategy hook-detach, stop-app or vfio-migration"
)


class Route(NamedTuple):
    """The route: the destination's libvirtd, its migration address, and its ports.

    A port of None: libvirt chooses one from its own range.
    """

    to_libvirtd: str
    address: str
    memory_port: int | None = None
    disks_port: int | None = None


class Contents(NamedTuple):
    """What is migrated. `copied_disks` are names of disks in the domain (vda).

    `proved_shared`: vmckpt has verified that both hosts share the other disks, which libvirt
    assumes only for some file systems. `detects_zeroes`: both libvirts can.
    """

    persistent: bool
    copied_disks: tuple[str, ...]
    proved_shared: bool
    encrypted: bool
    detects_zeroes: bool = False


class DomainPreflight(NamedTuple):
    """All checks, and how the domain is migrated if they pass.

    `options` are those requested, with "auto" replaced by its choice; `known_to_target`: the
    destination has a definition of it; `held_mib_per_s`: the speed with which its QEMU is held
    back; 0: QEMU uses its own measurement.
    """

    checks: tuple[Finding, ...]
    options: MigrationOptions
    route: tuple[Route, Contents] | None = None
    copies: tuple[DiskCopy, ...] = ()
    encryption: Encryption = UNENCRYPTED
    known_to_target: bool = False
    held_mib_per_s: int = 0

    @property
    def held_s(self) -> float:
        """How long QEMU is held back on average once all memory was sent: until the next query."""
        is_held = self.held_mib_per_s and self.options.method is not Method.POSTCOPY
        return sample_s(self.options) / 2 if is_held else 0.0

    def require(self, name: str, destination: str) -> tuple[Route, Contents]:
        """How it is migrated. Raises RefusedError naming every refusal."""
        what = f"'{name}' cannot migrate to {destination}"
        require(self.checks, what)
        if self.route is None:
            raise refusal(self.checks, what)
        return self.route


async def preflight(
    domain: Domain, source: Libvirtd, destination: Libvirtd, options: MigrationOptions
) -> DomainPreflight:
    """Ask both hosts; changes nothing. Raises HostDownError if one cannot be asked."""
    there = destination.host
    if at_once := is_there_already(domain, there) or _not_running(domain):
        return DomainPreflight((at_once,), options)
    arrives = arriving(domain, options.at_target)
    # Each question is a round trip to a host: independent ones are asked together.
    at_source, (at_target, (moving, (encryption, link))) = await both(
        _inspect_source(domain, source),
        both(
            _inspect_destination(arrives, source, destination, options),
            both(
                _inspect_disks(domain, arrives, source, there, options),
                both(
                    _encryption(source, destination, options),
                    find_link(options.tls, domain.host, there),
                ),
            ),
        ),
    )
    what, disks = domain.description, moving.disks
    loss = dirty_log.loss_of(what.accel_word, at_source.version, what.memory_back_ends)
    options = resolve_method(options, loses_pages=loss is not None)
    can_hold = at_source.can_hold and at_target.can_hold and options.method is not Method.STOP
    held = held_mib_per_s(what.memory_bytes) if can_hold else 0
    contents = Contents(
        domain.seen.persistent,
        disks.copied,
        disks.proved_shared,
        encrypted=encryption[0].scheme is Scheme.CERTIFICATES,
        detects_zeroes=min(at_source.libvirt, at_target.libvirt) >= DETECTS_ZEROES,
    )
    route = Route(link.uri, there.migration_address, *moving.ports)
    checks = (
        Finding("running", OK, f"the domain is {domain.state}"),
        *at_target.checks,
        *moving.checks,
        link.check,
        encryption[1],
        *at_source.checks,
        *postcopy_risk(options),
        *at_target.userfaults,
        *(dirty_log.checks(loss, options) if loss else ()),
        *encryption_checks(options, encryption[0]),
        *copy_checks(options, copies_disks=bool(disks.copied)),
        *option_checks(options),
        *client_checks(options),
        *arrival_checks(domain, options.at_target),
    )
    return DomainPreflight(
        checks,
        options,
        (route, contents),
        disks.plan.copies,
        encryption[0],
        at_target.known,
        held,
    )


def held_mib_per_s(memory_bytes: int) -> int:
    """The lowest speed at which the longest downtime still covers all of memory. Pure."""
    return max(1, math.ceil(memory_bytes / MIB * 1000 / UNLIMITED_DOWNTIME_MS))


class _AtSource(NamedTuple):
    version: QemuVersion
    checks: list[Finding]
    libvirt: tuple[int, int, int]
    can_hold: bool


class _AtTarget(NamedTuple):
    checks: list[Finding]
    known: bool
    userfaults: list[Finding]
    libvirt: tuple[int, int, int]

    @property
    def can_hold(self) -> bool:
        return self.libvirt >= HOLD_SINCE_LIBVIRT


class _Moving(NamedTuple):
    disks: DomainDisks
    checks: list[Finding]
    ports: list[int | None]


async def _inspect_destination(
    domain: Domain, source: Libvirtd, destination: Libvirtd, options: MigrationOptions
) -> _AtTarget:
    checks, ((names, userfaults), libvirt) = await both(
        destination_libvirt.checks(domain, source, destination),
        both(both(destination.names(), _userfaults(destination, options)), destination.version()),
    )
    name = await destination_libvirt.name(domain, names, destination.host)
    known = domain.uuid in {one.uuid for one in names}
    return _AtTarget([name, *checks], known, userfaults, libvirt)


async def _inspect_disks(
    domain: Domain, arrives: Domain, source: Libvirtd, destination: Host, options: MigrationOptions
) -> _Moving:
    elsewhere = disks_elsewhere(arrives)
    disks = await plan_domain_disks(domain, source, destination, options.disks, elsewhere)
    needed = 2 if disks.copied else 1
    checks, ports = await both(
        all_of(
            [
                destination_libvirt.files(arrives, destination, disks.plan.shared),
                ask(destination_host.address(domain.host, destination)),
                ask(destination_host.ports(destination, needed=needed)),
                ask(destination_host.clock(domain.host, destination)),
            ]
        ),
        _ports(destination, needed=needed),
    )
    found = [*disk_checks(disks.plan), *(check for some in checks for check in some)]
    return _Moving(disks, found, ports)


def is_there_already(domain: Domain, there: Host) -> Finding | None:
    """Refuse a migration to the domain's own host; None if it is elsewhere."""
    if domain.host.name != there.name:
        return None
    return Finding("same-host", REFUSE, f"the VM is on {there.name} already", "name another host")


def require_elsewhere(domain: Domain, there: Host) -> None:
    """Raises RefusedError for a migration to its own host, whose lock would be taken twice."""
    if found := is_there_already(domain, there):
        require([found], f"'{domain.name}' cannot migrate to {there.name}")


def _not_running(domain: Domain) -> Finding | None:
    if domain.is_arriving:
        remedy = "wait for its end, or see virsh domjobinfo"
        return Finding("running", REFUSE, "it is in the middle of a migration", remedy)
    if not domain.is_active:
        remedy = f"migrate it with --offline, or start it: vmckpt vm start {quote(domain.name)}"
        return Finding("running", REFUSE, f"'{domain.name}' is stopped", remedy)
    if domain.state not in ("running", "paused", "blocked"):
        remedy = "a domain in that state cannot be moved; see `vmckpt vm show`"
        return Finding("running", REFUSE, f"its state is '{domain.state}'", remedy)
    return None


async def busy(domain: Domain) -> Finding | None:
    """Refuse while another vmckpt command holds the domain; None if it is free."""
    owner = await domain.host.lock_owner(lock_path(domain.host.state_dir, domain.name))
    if owner is None:
        return None
    reason = f"{owner.action} is under way (run {owner.run}, pid {owner.pid})"
    return Finding("busy", REFUSE, reason, "wait for its end")


async def _inspect_source(domain: Domain, source: Libvirtd) -> _AtSource:
    version, libvirt = QemuVersion(*await source.qemu_version()), await source.version()
    checks = []
    if (await source.job(domain.uuid)).active:
        remedy = "wait for its end; virsh domjobinfo shows it, virsh domjobabort ends it"
        checks.append(Finding("busy", REFUSE, "libvirt has a job on the domain already", remedy))
    checks += await snapshot_checks(domain, source)
    for device in domain.description.passed_through:
        reason = f"the {device} is the host's own, and cannot be migrated"
        checks.append(Finding("migratable", REFUSE, reason, DETACH))
    if not any(check.code == "migratable" for check in checks):
        checks.append(Finding("migratable", OK, "no device of the host's own is passed through"))
    can_hold = libvirt >= HOLD_SINCE_LIBVIRT and version >= HOLD_SINCE_QEMU
    return _AtSource(version, checks, libvirt, can_hold)


async def snapshot_checks(domain: Domain, source: Libvirtd) -> list[Finding]:
    """Snapshots that prevent a migration."""
    names = [snapshot.name for snapshot in await source.snapshots(domain.uuid)]
    if not names:
        return []
    reason = f"it has snapshots ({', '.join(names)}), and libvirt moves no domain that has any"
    remedy = f"vmckpt checkpoint rm NAME --kind internal --vm {quote(domain.name)}"
    return [Finding("snapshots", REFUSE, reason, remedy)]


async def _encryption(
    source: Libvirtd, destination: Libvirtd, options: MigrationOptions
) -> tuple[Encryption, Finding]:
    if options.tls is Tls.PSK:
        reason = "libvirt encrypts by certificates only, not by a key for one migration"
        return UNENCRYPTED, Finding("tls", REFUSE, reason, "use --tls auto or require")
    here, there = source.host, destination.host
    directories = await both(certificate_dir_of(here), certificate_dir_of(there))
    remedy = (
        f"vmckpt host check --fixes {here.name} {there.name}  # prints the commands; or, in a "
        "network that you trust, --tls off"
    )
    try:
        name = options.tls_name
        found = await choose(options.tls, here, there, directories=directories, name=name)
    except RefusedError as exc:
        ours, theirs = directories
        reason = f"{exc.why} (qemu.conf names {ours} on {here.name}, {theirs} on {there.name})"
        return UNENCRYPTED, Finding("tls", REFUSE, reason, remedy)
    if found.scheme is Scheme.CERTIFICATES:
        reasons = await both(
            _unreadable(source, directories[0], CLIENT_FILES),
            _unreadable(destination, directories[1], SERVER_FILES),
        )
        if any(reasons):
            reason = "; ".join(filter(None, reasons))
            return UNENCRYPTED, Finding("tls", REFUSE, reason, remedy)
    one_machine = here.is_this_machine and there.is_this_machine
    if found.scheme is Scheme.UNENCRYPTED and not one_machine:
        remedy = (
            "leave out --tls off: everyone with access to the network can read the guest's memory"
        )
        return found, Finding("tls", WARN, found.reason, remedy)
    return found, Finding("tls", OK, found.reason)


async def _unreadable(session: Libvirtd, directory: Path, names: Sequence[str]) -> str:
    user = qemu_user(await session.capabilities())
    if not (missing := await unreadable(session.host, user, directory, names)):
        return ""
    return (
        f"QEMU on {session.host.name} cannot encrypt: its user (uid {user}) cannot read "
        f"{', '.join(missing)} in {directory}"
    )


async def _ports(destination: Host, *, needed: int) -> list[int | None]:
    """Ports from the host's range for memory and disks; None if libvirt may choose."""
    if destination.migration_ports is None:
        return [None] * needed
    first, last = destination.migration_ports
    taken = await destination.listening_ports(destination.migration_address)
    free: list[int | None] = [port for port in range(first, last + 1) if port not in taken]
    return free[:needed]


async def _userfaults(destination: Libvirtd, options: MigrationOptions) -> list[Finding]:
    if not options.may_postcopy:
        return []
    allowed = (await destination.host.read_text(destination_host.USERFAULTFD) or "").strip() == "1"
    users = qemu_users(await destination.capabilities())
    if allowed or 0 in users:
        text = f"QEMU may use it on {destination.host.name}"
        return [Finding("userfaultfd", OK, text)]
    reason = (
        f"post-copy needs userfaultfd, which QEMU's user may not use on {destination.host.name}"
    )
    return [
        Finding("userfaultfd", REFUSE, reason, "as root: sysctl -w vm.unprivileged_userfaultfd=1")
    ]
