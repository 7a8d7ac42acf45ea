"""On which host a domain is that a checkpoint is to become. On the operator's machine."""

from collections.abc import Collection

from vmckpt.errors import HostDownError, OutcomeUnknownError, RefusedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts, find_host
from vmckpt.vm.domains.inventory import Domain, all_domains, choose


async def host_of_domain(uuid: str, taken_on: str) -> Host:
    """The host that has the domain now, otherwise the one where it was.

    Raises HostDownError: only a libvirtd that does not answer may have it.
    """
    found = await all_domains(all_hosts())
    here = _of(uuid, found.given)
    domain = choose(here)
    if domain is not None and (domain.runs or not found.silent):
        return domain.host
    if found.silent:
        raise HostDownError(
            "the domain runs on none of the hosts whose libvirtd answers, and would run twice if "
            "another runs it",
            why="; ".join(f"{error.what}: {error.why}" for error in found.silent),
            remedy="if it no longer runs there, name the host to restore it on: --host",
        )
    return find_host(taken_on)


async def require_not_elsewhere(name: str, uuid: str, host: Host) -> None:
    """Raises OutcomeUnknownError: another host that answers has the domain, too."""
    others = _of(uuid, await _on_others(host))
    if others:
        raise OutcomeUnknownError(
            f"'{name}' is on {' and '.join(one.host.name for one in others)}",
            why=f"it would be the same domain ({uuid}) on {host.name} too",
            remedy="restore it there (--host), make a copy (--as NAME), or remove it there first: "
            "virsh undefine",
        )


async def require_no_namesake(names: Collection[str], host: Host) -> None:
    """For new domains. Raises RefusedError: another host that answers has one of such a name."""
    for one in await _on_others(host):
        if one.name in names:
            raise RefusedError(
                f"there is a domain '{one.name}' already",
                why=f"on host {one.host.name}: commands would not know which of two is meant",
                remedy="choose another name",
            )


async def _on_others(host: Host) -> list[Domain]:
    found = await all_domains(all_hosts())
    return [one for one in found.given if one.host.name != host.name]


def _of(uuid: str, domains: list[Domain]) -> list[Domain]:
    return [domain for domain in domains if domain.uuid == uuid]
