"""The Ansible role: every variable is declared, documented and used; hosts get what was tested."""

import os
import re
import stat
import subprocess
import textwrap
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROLE = REPOSITORY / "ansible/roles/vmckpt"
PINNED = re.compile(r"^([a-z][\w.-]*)==(\S+)", re.MULTILINE)

STRETCH = re.DOTALL | re.MULTILINE


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


def script_of(task: str) -> str:
    """What a task has sh do."""
    found = re.search(rf"^- name: {task}$.*?^      - \|\n(.*?)^      - sh$", read("tasks"), STRETCH)
    assert found
    return textwrap.dedent(found[1])


def run(task: str, *words: str, path: str = os.environ["PATH"]) -> tuple[int, str]:
    done = subprocess.run(
        ["sh", "-euc", script_of(task), "sh", *words],
        capture_output=True, text=True, check=False, env={"PATH": path},
    )  # fmt: skip
    return done.returncode, done.stdout.strip()


def test_nothing_of_a_directory_of_the_user_is_given_to_that_user_through_a_link() -> None:
    tasks = re.split(r"^- name: ", read("tasks"), flags=re.MULTILINE)
    inside = re.compile(
        r'builtin\.[a-z]+:.*\b(path|dest): "{{ vmckpt_(home|state_dir) }}/', re.DOTALL
    )
    [hugepages] = [task for task in tasks if inside.search(task)]
    assert "    follow: false\n" in hugepages
    [keys] = [task for task in tasks if "authorized_keys\n" in task]
    assert '- "--reuid={{ vmckpt_user }}"\n' in keys


def test_a_key_is_there_once_as_it_is_wanted(tmp_path: Path) -> None:
    keys = tmp_path / ".ssh/authorized_keys"

    def put(line: str) -> tuple[int, str]:
        key = "^[^#]*" + " ".join(re.findall(r"ssh-ed25519 \S+", line))
        return run("Let operators log in as the user", str(tmp_path), line, key)

    assert put("restrict ssh-ed25519 AA+/a= anna") == (0, "changed")
    assert put("restrict ssh-ed25519 BB bert") == (0, "changed")
    assert put("restrict ssh-ed25519 AA+/a= anna") == (0, "")
    keys.write_text("# ssh-ed25519 AA+/a=\nssh-rsa CC\n" + keys.read_text())
    assert put("restrict,pty ssh-ed25519 AA+/a= anna") == (0, "changed")
    assert keys.read_text().splitlines() == [
        "# ssh-ed25519 AA+/a=",
        "ssh-rsa CC",
        "restrict ssh-ed25519 BB bert",
        "restrict,pty ssh-ed25519 AA+/a= anna",
    ]
    assert [stat.S_IMODE(one.stat().st_mode) for one in (keys.parent, keys)] == [0o700, 0o600]
    assert os.listdir(keys.parent) == [keys.name]


def test_what_is_no_key_takes_the_place_of_none() -> None:
    """A path, or two keys in one text: all other operators' keys went, or one was unrestricted."""
    [pattern] = re.findall(r"trim is match\('(.*\$)'\)", read("tasks"))
    for right in (
        "ssh-ed25519 AA+/a= anna",
        "sk-ssh-ed25519@openssh.com AA b c",
        'from="::1" ssh-rsa A',
    ):
        assert re.match(pattern, right), right
    for wrong in ("", "~/.ssh/id_ed25519.pub", "ssh-rsa A\nssh-rsa B", "ssh-rsa\tA", "# ssh-rsa A"):
        assert not re.match(pattern, wrong), wrong


def test_huge_pages_are_mounted_on_a_directory_and_on_what_no_link_leads_to(tmp_path: Path) -> None:
    mount, state = tmp_path / "bin/mount", tmp_path / "state"
    mount.parent.mkdir()
    mount.write_text("#!/bin/sh\npwd -P\n")
    mount.chmod(0o755)
    (state / "hugepages").mkdir(parents=True)
    (tmp_path / "link").symlink_to("state")
    path = f"{mount.parent}:{os.environ['PATH']}"
    for location in (state, tmp_path / "link"):
        found = run("Mount huge pages", str(location), "mode=700", path=path)
        assert found == (0, str(state.resolve() / "hugepages"))
    (state / "hugepages").rmdir()
    (state / "hugepages").symlink_to("/etc")
    assert run("Mount huge pages", str(state), "mode=700", path=path) == (1, "")


def test_hosts_get_the_versions_that_are_tested_here() -> None:
    tested = dict(PINNED.findall((REPOSITORY / "requirements.lock").read_text()))
    sent = dict(PINNED.findall((REPOSITORY / "requirements-runtime.lock").read_text()))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=~]", line)[0] for line in project["dependencies"]}
    assert {name.replace(".", "-") for name in names} <= sent.keys()
    assert sent.items() <= tested.items()
