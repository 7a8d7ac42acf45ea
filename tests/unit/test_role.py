"""The Ansible role: every variable is declared, documented and used; hosts get what was tested."""

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROLE = REPOSITORY / "ansible/roles/vmckpt"
PINNED = re.compile(r"^([a-z][\w.-]*)==(\S+)", re.MULTILINE)


def read(*folders: str) -> str:
    files = [file for folder in folders for file in sorted((ROLE / folder).iterdir())]
    assert files
    return "\n".join(file.read_text() for file in files)


def defaults() -> list[str]:
    return re.findall(r"^(vmckpt_\w+):", read("defaults"), re.MULTILINE)


def test_every_variable_is_checked_and_documented() -> None:
    checked = re.findall(r"^      (vmckpt_\w+):$", read("meta"), re.MULTILINE)
    documented = re.findall(
        r"^\| `(vmckpt_\w+)` \|", (ROLE / "README.md").read_text(), re.MULTILINE
    )
    assert len(defaults()) > 20
    assert defaults() == checked == documented


def test_every_variable_is_used_and_what_is_used_is_known() -> None:
    text = read("tasks", "handlers", "templates", "vars")
    registered = re.findall(r"^ *(?:register: |(?=vmckpt_\w+:))(vmckpt_\w+)", text, re.MULTILINE)
    used = set(re.findall(r"\bvmckpt_[a-z_]+\b", text))
    assert used - set(registered) - set(defaults()) == set()
    assert set(defaults()) - used == set()


def test_only_modules_of_ansible_core_are_used() -> None:
    modules = re.findall(
        r"^ +([a-z_]+\.[a-z_]+)\.([a-z_]+):", read("tasks", "handlers"), re.MULTILINE
    )
    assert {collection for collection, _ in modules} == {"ansible.builtin"}


def test_no_link_in_a_directory_of_the_user_is_given_to_that_user() -> None:
    tasks = re.split(r"^- name: ", read("tasks"), flags=re.MULTILINE)
    inside = re.compile(r'builtin\.file:.*path: "{{ vmckpt_(home|state_dir) }}/', re.DOTALL)
    found = [task for task in tasks if inside.search(task)]
    assert len(found) == 2
    assert all("    follow: false\n" in task for task in found)


def test_hosts_get_the_versions_that_are_tested_here() -> None:
    tested = dict(PINNED.findall((REPOSITORY / "requirements.lock").read_text()))
    sent = dict(PINNED.findall((REPOSITORY / "requirements-runtime.lock").read_text()))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=~]", line)[0] for line in project["dependencies"]}
    assert {name.replace(".", "-") for name in names} <= sent.keys()
    assert sent.items() <= tested.items()
