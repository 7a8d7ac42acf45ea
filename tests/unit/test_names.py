"""One class name, one concept: a reader knows a class by its name, wherever it is used."""

import ast
from collections import defaultdict
from pathlib import Path

import vmckpt

PACKAGE = Path(vmckpt.__file__).parent


def test_no_two_classes_have_one_name() -> None:
    found = defaultdict[str, list[str]](list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    assert len(found) > 500
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
