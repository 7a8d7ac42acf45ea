"""vmckpt host check: problems of hosts, and their fixes."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.output import Json, run, show

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host, HostEntry
    from vmckpt.preflight.host.checks import HostReport


def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Host; with --fixes several. [default: local; with --fixes all]", metavar="HOST..."
        ),
    ] = None,
    fixes: Annotated[
        bool, typer.Option("--fixes", help="Show only problems, with commands that fix them.")
    ] = False,
    json: Json = False,
) -> None:
    """Show a host's capabilities and problems.

    Exit code 4 if it can run no VMs.
    """
    from vmckpt.errors import UsageError

    if fixes:
        _show_fixes(names or [], as_json=json)
    elif names and len(names) > 1:
        raise UsageError(
            "several hosts are named",
            why="only one host can be shown in full; --fixes shows the problems of several hosts",
            remedy="name one host, or add --fixes",
        )
    else:
        _show_host(names[0] if names else "local", as_json=json)


def _show_host(name: str, *, as_json: bool) -> None:
    from vmckpt.hosts.inventory.inventory import find_entry, find_host, local_host
    from vmckpt.preflight.host.checks import check_host
    from vmckpt.ui.findings import findings_text
    from vmckpt.ui.tables import fields, in_words, without_empty

    host = find_host(name)
    report = run(check_host(host, local_host(), find_entry(name)))
    facts = host_facts(host) | report.facts
    text = f"{fields(without_empty(in_words(facts)))}\n\n{findings_text(report.checks)}"
    show(facts | _checks(report), text, as_json=as_json)
    if not report.fit:
        raise typer.Exit(4)


def _show_fixes(names: list[str], *, as_json: bool) -> None:
    from vmckpt.hosts.inventory.inventory import all_hosts, find_host
    from vmckpt.preflight.host.checks import check_hosts

    hosts = [find_host(name) for name in dict.fromkeys(names)] or all_hosts()
    reports = run(check_hosts(hosts))
    parts = [f"{host.name}:{_verdict(report)}" for host, report in zip(hosts, reports, strict=True)]
    answer = [
        {"name": host.name} | _checks(report) for host, report in zip(hosts, reports, strict=True)
    ]
    show({"hosts": answer}, "\n\n".join(parts), as_json=as_json)
    if not all(report.fit for report in reports):
        raise typer.Exit(4)


def _verdict(report: "HostReport") -> str:
    from vmckpt.ui.findings import problems_text

    problems = problems_text(report.checks)
    return f"\n{problems}" if problems else " nothing is wrong"


def _checks(report: "HostReport") -> dict[str, Any]:
    return {"fit": report.fit, "checks": [check._asdict() for check in report.checks]}


def host_facts(host: "Host | HostEntry") -> dict[str, Any]:
    """What is said of a host wherever one is shown."""
    return {
        "name": host.name,
        "migration_address": host.migration_address,
        "migration_ports": host.migration_ports,
        "second_address": host.second_address,
        "qemu": host.qemu,
        "bridge": host.bridge,
        "libvirt": str(host.libvirt) if host.libvirt else None,
        "vm_uids": str(host.vm_uids) if host.vm_uids else None,
        "state_dir": str(host.state_dir),
    }
