"""vmckpt check, and the answer of `vmckpt migrate --dry-run`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.output import Json, run, show

if TYPE_CHECKING:
    from vmckpt.drivers.driver import Driver
    from vmckpt.hosts.host import Host
    from vmckpt.options.migration import MigrationOptions
    from vmckpt.preflight.finding import Examined


def check(
    vm: Annotated[str, typer.Argument(help="The VM's name.")],
    hosts: Annotated[
        list[str], typer.Argument(help="Possible destination hosts.", metavar="HOST...")
    ],
    json: Json = False,
) -> None:
    """Check whether a VM can migrate to other hosts.

    Changes nothing. To check with options of `migrate`: `vmckpt migrate VM HOST OPTIONS --dry-run`.
    """
    from vmckpt.cli.found import find
    from vmckpt.drivers.driver import examined
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.options.migration import MigrationOptions
    from vmckpt.ui.findings import findings_text

    found, targets = run(find(vm)), [find_host(host) for host in dict.fromkeys(hosts)]
    answers = [(target, run(examined(found, target, MigrationOptions()))) for target in targets]
    facts = [_facts(target, answer) for target, answer in answers]
    tables = [
        f"{_headline(found, *answer)}\n{findings_text(answer[1].checks)}" for answer in answers
    ]
    result = {"vm": found.name, "source": found.host.name, "targets": facts}
    show(result, "\n\n".join(tables), as_json=json)
    if not all(answer.is_possible for _, answer in answers):
        raise typer.Exit(4)


def dry_run(name: str, target: "Host", options: "MigrationOptions", *, as_json: bool) -> None:
    """Show what `migrate` with these options would find; exit code 4 when it would refuse."""
    from vmckpt.cli.found import find
    from vmckpt.ui.findings import findings_text

    vm = run(find(name))
    answer = run(vm.examine(target, options))
    result = {"vm": vm.name, "source": vm.host.name, **_facts(target, answer)}
    show(result, findings_text(answer.checks), as_json=as_json)
    if not answer.is_possible:
        raise typer.Exit(4)


def _facts(target: "Host", answer: "Examined") -> dict[str, Any]:
    checks = [check._asdict() for check in answer.checks]
    return {"target": target.name, "possible": answer.is_possible, "checks": checks}


def _headline(vm: "Driver", target: "Host", answer: "Examined") -> str:
    word = "can" if answer.is_possible else "cannot"
    return f"{vm.name}: {vm.host.name} -> {target.name}: it {word} move"
