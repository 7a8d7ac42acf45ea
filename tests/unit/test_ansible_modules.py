"""The Ansible modules document the options that they have, and pass on options that exist."""

import ast
import re
from pathlib import Path
from typing import Any

import click
import pytest

from tests.unit.test_language import COMMANDS

ANSIBLE = Path(__file__).parents[2] / "ansible"
MODULES = sorted((ANSIBLE / "library").glob("*.py"))


def constants(path: Path) -> dict[str, Any]:
    """The literal constants of a module; what they take from others is in them."""
    found: dict[str, Any] = {}
    if path.parent.name == "library":
        found |= constants(ANSIBLE / "module_utils/vmckpt.py")
    for one in ast.parse(path.read_text()).body:
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            found[one.targets[0].id] = value(one.value, found)
    return found


def value(node: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(node, ast.Dict):
        result: dict[str, Any] = {}
        for key, one in zip(node.keys, node.values, strict=True):
            if key is None:
                assert isinstance(one, ast.Name)
                result |= known[one.id]
            else:
                result[ast.literal_eval(key)] = value(one, known)
        return result
    return ast.literal_eval(node)


def test_there_are_three() -> None:
    names = ["vmckpt_checkpoint", "vmckpt_guard", "vmckpt_migrate"]
    assert [path.stem for path in MODULES] == names
    readme = (ANSIBLE / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_its_options_are_documented(path: Path) -> None:
    found = constants(path)
    text = found["DOCUMENTATION"]
    assert f"module: {path.stem}\n" in text
    documented = dict(re.findall(r"^  (\w+): \{description: (.*)\}$", text, re.MULTILINE))
    options = {name: facts for name, facts in found["OPTIONS"].items()}
    assert documented.keys() == options.keys()
    for name, facts in options.items():
        words = documented[name]
        assert f"type: {facts['type']}" in words
        assert ("required: true" in words) == facts.get("required", False)
        assert ("elements: str" in words) == ("elements" in facts)
        for choice in facts.get("choices", ()):
            assert re.search(rf"choices: \[.*\b{choice}\b.*\]", words)
        default = facts.get("default")
        assert ("default: " in words) == (default is not None)
        if default is not None:
            assert f"default: {str(default).lower() if default is False else default}" in words


@pytest.mark.parametrize(
    ("module", "names", "command"),
    [
        ("vmckpt_migrate", "LIVE", "migrate"),
        ("vmckpt_guard", "PASSED", "guard run"),
    ],
)
def test_what_it_passes_on_is_an_option_of_the_command(
    module: str, names: str, command: str
) -> None:
    taken = {
        name: one
        for one in COMMANDS[command].params
        if isinstance(one, click.Option)
        for name in one.opts
    }
    for name, facts in constants(ANSIBLE / f"library/{module}.py")[names].items():
        option = taken["--" + name.replace("_", "-")]
        assert option.multiple == (facts["type"] == "list")
        if isinstance(option.type, click.Choice):
            assert set(facts["choices"]) == {str(one) for one in option.type.choices}
