"""The page of the objects that commands print with --json, made from their types."""

import inspect
import re
from collections.abc import Iterator
from html import escape

from vmckpt.checkpoint.fork.fork import Forked
from vmckpt.checkpoint.restore.requests import Restored
from vmckpt.checkpoint.restore.restore_disks import DisksRestored
from vmckpt.drivers.driver import Started, VmInfo
from vmckpt.forecast.model.link import LinkModel
from vmckpt.hosts.every import Arrival
from vmckpt.migrate.outcome.recover import Recovery
from vmckpt.migrate.report import MigrationReport
from vmckpt.preflight.finding import Finding

# What has the type's fields: the object of a command, or the objects in one of its lists.
RESULTS: dict[str, type] = {
    "vm list: vms; vm show": VmInfo,
    "vm list: arrivals": Arrival,
    "vm start, vm run": Started,
    "migrate": MigrationReport,
    "migrate --recover": Recovery,
    "check: targets, checks; host check: checks": Finding,
    "checkpoint restore": Restored,
    "checkpoint restore --disks-only": DisksRestored,
    "fork: forks": Forked,
    "host calibrate": LinkModel,
}


_WORDS = (
    "The objects that commands print with `--json`, by the types that make them. What else results "
    "have: [exit codes and JSON](../docs/exit-codes-and-json.md)."
)
# Of a type's text, as JSON has it.
_AS_JSON = (
    (r"ForwardRef\('(\w+)'\)", r"\1"),
    (r"\b(typing|collections\.abc)\.|\bvmckpt(\.\w+)*\.", ""),
    (r"\btuple\[(.*), \.\.\.\]", r"list[\1]"),
    (r"\btuple\b", "list"),
    (r"\bNone\b", "null"),
)


def results_page() -> str:
    """A page of them, in Markdown."""
    text = ["# Results", _WORDS]
    for what, kind in RESULTS.items():
        text += [f"## {what}", *_described(kind)]
    return "\n\n".join(text) + "\n"


def _described(kind: type) -> Iterator[str]:
    yield from (inspect.getdoc(kind) or "").split("\n\n")
    fields = inspect.get_annotations(kind).items()
    rows = [f"| `{name}` | {_as_json(note)} |" for name, note in fields]
    yield "\n".join(["| field | type |", "|---|---|", *rows])


def _as_json(note: object) -> str:
    text = note.__name__ if isinstance(note, type) and not hasattr(note, "__args__") else str(note)
    for pattern, new in _AS_JSON:
        text = re.sub(pattern, new, text)
    return f"<code>{escape(text)}</code>".replace("|", "&#124;")
