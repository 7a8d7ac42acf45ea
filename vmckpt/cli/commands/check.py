"""vmckpt check: what `vmckpt migrate --dry-run` does, for one destination or several."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.options.arguments import VmName
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, run, show
from vmckpt.options.migration import MigrationOptions

if TYPE_CHECKING:
    from vmckpt.drivers.driver import Driver
    from vmckpt.hosts.host import Host
    from vmckpt.preflight.finding import Examined


@together
def check(
    vm: VmName,
    hosts: Annotated[
        list[str], typer.Argument(help="Possible destination hosts.", metavar="HOST...")
    ],
    *,
    options: MigrationOptions,
    json: Json = False,
) -> None:
    """Check whether a VM can migrate to other hosts.

    Changes nothing: `vmckpt migrate VM HOST --dry-run`, for several hosts. Exit code 4 if the
    migration to one of them would be refused.
    """
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.options.sense import require_sense

    require_sense(options)
    show_checks(vm, [find_host(host) for host in dict.fromkeys(hosts)], options, as_json=json)


def show_checks(
    name: str, destinations: "Sequence[Host]", options: MigrationOptions, *, as_json: bool
) -> None:
    """Show what a migration to each of them would find; exit code 4 if one would be refused."""
    from vmckpt.cli.found import find
    from vmckpt.drivers.driver import examined
    from vmckpt.ui.findings import findings_text

    vm = run(find(name))
    answers = [
        (destination, run(examined(vm, destination, options))) for destination in destinations
    ]
    is_possible = all(answer.is_possible for _, answer in answers)
    facts = [_facts(destination, answer) for destination, answer in answers]
    tables = [f"{_headline(vm, *answer)}\n{findings_text(answer[1].checks)}" for answer in answers]
    result = {"vm": vm.name, "source": vm.host.name, "possible": is_possible, "targets": facts}
    show(result, "\n\n".join(tables), as_json=as_json)
    if not is_possible:
        raise typer.Exit(4)


def _facts(destination: "Host", answer: "Examined") -> dict[str, Any]:
    checks = [check._asdict() for check in answer.checks]
    return {"target": destination.name, "possible": answer.is_possible, "checks": checks}


def _headline(vm: "Driver", destination: "Host", answer: "Examined") -> str:
    word = "can" if answer.is_possible else "cannot"
    return f"{vm.name}: {vm.host.name} -> {destination.name}: it {word} move"
