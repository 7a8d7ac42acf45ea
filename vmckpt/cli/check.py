"""vmckpt check, and the answer of `vmckpt migrate --dry-run`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.output import Json, run, show

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host
    from vmckpt.migrate.options import Options
    from vmckpt.migrate.preflight import Preflight
    from vmckpt.vm.inventory import Vm


def check(
    vm: Annotated[str, typer.Argument(help="The VM's name.")],
    hosts: Annotated[list[str], typer.Argument(help="Where it might run.", metavar="HOST...")],
    json: Json = False,
) -> None:
    """Say whether a VM can move to each of some hosts, and what is against it; change nothing.

    For other than `migrate`'s usual options: `vmckpt migrate VM HOST OPTIONS --dry-run`.
    """
    from vmckpt.cli.vm import settled
    from vmckpt.hosts.inventory import find_host
    from vmckpt.migrate.options import Options

    found, targets = run(settled(vm)), [find_host(host) for host in dict.fromkeys(hosts)]
    answers = run(_ask_all(found, targets, Options()))
    facts = [_facts(target, answer) for target, answer in answers]
    tables = [f"{_headline(found, *answer)}\n{_table(answer[1])}" for answer in answers]
    result = {"vm": found.name, "source": found.host.name, "targets": facts}
    show(result, "\n\n".join(tables), as_json=json)
    if not all(answer.possible for _, answer in answers):
        raise typer.Exit(4)


def dry_run(name: str, target: "Host", options: "Options", *, as_json: bool) -> None:
    """Show what `migrate` with these options would find; exit code 4 when it would refuse."""
    from vmckpt.cli.vm import settled

    vm = run(settled(name))
    answer = run(_ask(vm, target, options))
    result = {"vm": vm.name, "source": vm.host.name, **_facts(target, answer)}
    show(result, _table(answer), as_json=as_json)
    if not answer.possible:
        raise typer.Exit(4)


async def _ask(vm: "Vm", target: "Host", options: "Options") -> "Preflight":
    from vmckpt.migrate.preflight import busy, preflight

    found = await preflight(vm, target, options)
    if (held := await busy(vm)) is not None:
        return found._replace(checks=(held, *found.checks))
    return found


async def _ask_all(
    vm: "Vm", targets: "Sequence[Host]", options: "Options"
) -> "list[tuple[Host, Preflight]]":
    from vmckpt.errors import VmckptError
    from vmckpt.migrate.check import REFUSE, Check
    from vmckpt.migrate.preflight import Preflight

    answers = []
    for target in targets:
        try:
            answer = await _ask(vm, target, options)
        except VmckptError as exc:
            # The others are asked all the same.
            silent = Check("reachable", REFUSE, f"{exc.what}: {exc.why}", exc.remedy)
            answer = Preflight((silent,), options)
        answers.append((target, answer))
    return answers


def _facts(target: "Host", answer: "Preflight") -> dict[str, Any]:
    checks = [check._asdict() for check in answer.checks]
    return {"target": target.name, "possible": answer.possible, "checks": checks}


def _headline(vm: "Vm", target: "Host", answer: "Preflight") -> str:
    word = "can" if answer.possible else "cannot"
    return f"{vm.name}: {vm.host.name} -> {target.name}: it {word} move"


def _table(answer: "Preflight") -> str:
    from vmckpt.ui.tables import table

    rows = [(check.verdict, check.code, check.reason, check.remedy) for check in answer.checks]
    return table(("verdict", "check", "reason", "remedy"), rows)
