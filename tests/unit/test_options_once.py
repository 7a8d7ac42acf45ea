"""An option and an argument are declared once, however many commands take it.

A flag that is declared more often has as many meanings, named here.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import vmckpt

pytestmark = pytest.mark.unit

ROOT = Path(vmckpt.__file__).parent
# What each declaration of a flag is about.
MEANINGS = {
    "--address": ("a guest's", "a host's"),
    "--check": ("of a guarded guest's health", "of a store, after a schedule's run"),
    "--count": ("of forks", "of a schedule's next runs"),
    "--disks": ("copied by a migration", "removed with a VM", "copied to a standby"),
    "--every": ("runs of a schedule", "refreshes of a display", "health checks"),
    "--for": ("a measurement", "the watch after a guarded command"),
    "--format": ("of an image", "of a VM's description", "of a checkpoint for libvirt"),
    "--force": ("a power cut", "a reset", "the removal of a guard's pin"),
    "--group": ("VMs to take as one", "a group that was taken"),
    "--host": (
        "where a checkpoint is restored",
        "where a VM is made",
        "where a domain's XML becomes a VM",
        "whose VMs are listed",
        "from which a VM is removed",
        "on which a VM is stopped",
    ),
    "--name": (
        "a checkpoint's",
        "of forks",
        "a schedule's",
        "a key's",
        "of a VM that was a domain",
    ),
    "--qemu": ("a host's", "of a lab's hosts in order", "of a demonstration"),
    "--reason": ("for a pin", "for a drain"),
    "--replace": ("a checkpoint", "a store's key file"),
    "--tag": ("to give", "to search for"),
    "--timeout": ("of memory", "of a guarded command", "of a shutdown"),
    "--trust": ("a checkpoint", "a QEMU's command line"),
    "--watch": ("a dirty rate", "a replication"),
}


def test_a_flag_is_declared_as_often_as_it_has_meanings() -> None:
    found = Counter(flag for folder in ("cli", "options") for flag in _declared(ROOT / folder))
    assert found["--store"] == found["--key-file"] == found["--dry-run"] == 1
    assert "a shared option without a flag" not in found
    assert {flag: count for flag, count in found.items() if count > 1} == {
        flag: len(meanings) for flag, meanings in MEANINGS.items()
    }


def test_an_argument_is_declared_once() -> None:
    found = Counter(
        argument for path in (ROOT / "cli").rglob("*.py") for argument in _arguments(path)
    )
    assert {argument: count for argument, count in found.items() if count > 1} == {}


def _arguments(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated":
            text = ast.unparse(node.slice)
            if "typer.Argument(" in text:
                yield text


def _declared(folder: Path) -> Iterator[str]:
    """The first flag of each declaration."""
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.Option", "option"):
                yield from _flags(node)[:1]
            elif isinstance(node, ast.arg | ast.AnnAssign) and _is_named_by(node.annotation):
                name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
                yield "--" + name.strip("_").replace("_", "-")
            elif isinstance(node, ast.Assign) and _is_named_by(node.value):
                yield "a shared option without a flag"


def _is_named_by(annotation: ast.expr | None) -> bool:
    """Whether a parameter's or a field's name is the flag: an option that names none itself."""
    return annotation is not None and any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Option" and not _flags(node)
        for node in ast.walk(annotation)
    )


def _flags(call: ast.Call) -> list[str]:
    texts = [one.value for one in call.args if isinstance(one, ast.Constant)]
    words = " ".join(text for text in texts if isinstance(text, str)).split()
    return [word for word in words if word.startswith("--")]
