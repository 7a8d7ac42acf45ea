"""docs/any-vm.md: what vmckpt does with each kind of VM, by the walk in tests/real/test_any_vm.py.

The walk writes its cells to docs/any-vm.json, and the page that follows from them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
RESULTS, PAGE = DOCS / "any-vm.json", DOCS / "any-vm.md"
KINDS = {"own": "VM of vmckpt's own", "adopted": "adopted QEMU", "domain": "libvirt domain"}
# What is done with one, as the page has it.
OPERATIONS = {
    "migrate": "[migrate](migrate.md) to another host and back",
    "plan": "[plan](plan.md), and a migration with constraints",
    "dirty-rate": "[dirty-rate](plan.md)",
    "checkpoint": "[checkpoint](checkpoint.md) of the running guest",
    "restore": "[restore](checkpoint.md) in place",
    "restore-as": "restore as a copy",
    "restore-elsewhere": "restore on another host",
    "fork": "[fork](checkpoint.md)",
    "guard": "[guard](guard.md): a command that succeeds, and one that is rolled back",
    "schedule": "[schedule](schedule.md)",
    "group": "[group](groups.md): a checkpoint with another VM, and back to it",
    "replicate": "[replicate](replicate.md), fail over and back",
    "drain": "[drain](drain.md) and undrain its host",
    "devices": "[passed-through devices](devices.md)",
    "watch": "[top](watching.md) and metrics",
}
_HEAD = """\
# Any VM

What works with which kind of VM. Each cell of the table is the result of a run: `make any-vm` does
each operation with a real guest of that kind, by the command line, on two hosts that look like
machines. The guest dirties memory and writes to its disk, which is its host's own. After each
operation its own checks must find all of its memory and disk intact, it must run on exactly one
host, and nothing may be left of the operation. The figures are what the commands reported in that
run ({machine}, without KVM, shared with other work): they show that an operation works, not how
fast it is. How fast: [measured.md](measured.md).

Adopted QEMUs are as another program started them, domains as `virsh define` and `virsh start` make
them.
"""
_REFUSED = """\
## Refused

Exit code 4, nothing was changed. The errors, as the commands print them; `{own}` is the VM of
vmckpt's own, `{adopted}` the adopted one, `{domain}` the domain, `/shared` a folder that both hosts
have.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of an operation: a figure, if the command reports one, or its refusal."""

    figure: str = ""
    refused: Mapping[str, str] | None = None  # "command" and, of its error: "what", "why", "remedy"


@dataclass(frozen=True, slots=True)
class Results:
    """A whole walk: on what, with VMs of which names, and its cells by operation and kind."""

    machine: str
    names: Mapping[str, str]
    cells: Mapping[str, Mapping[str, Cell]]


def read(path: Path = RESULTS) -> Results:
    """The results of the walk that the page is of."""
    found: dict[str, Any] = json.loads(path.read_text())
    cells = {
        operation: {kind: Cell(**cell) for kind, cell in row.items()}
        for operation, row in found["cells"].items()
    }
    return Results(found["machine"], found["names"], cells)


def write(walked: Results) -> None:
    """Write the results, with earlier ones of cells that were not walked; the page, if it is whole.

    A walk of a few cells (`pytest -k`) so replaces only these.
    """
    known = read().cells if RESULTS.exists() else {}
    rows = {one: {**known.get(one, {}), **walked.cells.get(one, {})} for one in OPERATIONS}
    cells = {one: {kind: row[kind] for kind in KINDS if kind in row} for one, row in rows.items()}
    results = replace(walked, cells=cells)
    RESULTS.write_text(json.dumps(asdict(results), indent=1) + "\n")
    if all(row.keys() == KINDS.keys() for row in cells.values()):
        PAGE.write_text(page(results))


def page(results: Results) -> str:
    """The page, Markdown; every cell of the table is there."""
    notes: dict[tuple[str, ...], list[str]] = {}  # errors, with the commands that print them
    lines = [f"| | {' | '.join(KINDS.values())} |", f"|---|{'---|' * len(KINDS)}"]
    for operation, title in OPERATIONS.items():
        row = [_cell(results.cells[operation][kind], notes) for kind in KINDS]
        lines.append(f"| {title} | {' | '.join(row)} |")
    parts = [_HEAD.format(machine=results.machine), "\n".join(lines) + "\n"]
    if notes:
        parts += [_REFUSED.format(**results.names), "\n".join(_footnotes(notes))]
    return "\n".join(parts)


def _cell(cell: Cell, notes: dict[tuple[str, ...], list[str]]) -> str:
    if cell.refused is None:
        return f"works: {cell.figure}" if cell.figure else "works"
    error = tuple(cell.refused[part] for part in ("what", "why", "remedy"))
    commands = notes.setdefault(error, [])
    if cell.refused["command"] not in commands:
        commands.append(cell.refused["command"])
    number = list(notes).index(error) + 1
    return f"refused ([{number}](#refused))"


def _footnotes(notes: Mapping[tuple[str, ...], list[str]]) -> Iterator[str]:
    for number, ((what, why, remedy), commands) in enumerate(notes.items(), start=1):
        yield f"{number}. {', '.join(f'`{command}`' for command in commands)}\n"
        yield f"        error: {what}\n          why: {why}\n          do:  {remedy}\n"
