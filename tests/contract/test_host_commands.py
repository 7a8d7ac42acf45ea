"""vmckpt host add, list, check, doctor, remove, against a real sshd."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tests.sshd import Sshd, sshd

COMMAND = [sys.executable, "-m", "vmckpt.cli.entry"]


@dataclass(frozen=True, slots=True)
class Operator:
    state_dir: Path
    server: Sshd

    def vmckpt(self, *words: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [*COMMAND, *words, "--json"],
            env=os.environ | {"VMCKPT_STATE_DIR": str(self.state_dir)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, json.loads(done.stdout)

    def paste(self, line: str) -> None:
        """What a person does with a remedy."""
        tools = self.state_dir.parent / "bin"
        tools.mkdir(exist_ok=True)
        command = tools / "vmckpt"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
        command.chmod(0o755)
        there = {"VMCKPT_STATE_DIR": str(self.state_dir), "PATH": f"{tools}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", line], env=os.environ | there, timeout=60, check=True)

    def add(self, name: str, *more: str) -> tuple[int, dict[str, Any]]:
        where = f"ssh://root@127.0.0.1:{self.server.port}"
        reached = ("--ssh-config", str(self.server.config), "--vmckpt", str(self.server.vmckpt))
        return self.vmckpt("host", "add", name, where, *reached, *more)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as made:
        yield made


@pytest.fixture
def operator(server: Sshd, tmp_path: Path) -> Operator:
    return Operator(tmp_path / "op", server)


def test_a_host_is_added_with_what_it_says_of_itself(operator: Operator, tmp_path: Path) -> None:
    code, added = operator.add("a", "--bridge", "br7", "--migration-ports", "50000-50009")
    assert code == 0
    # Where vmckpt there keeps its state, and the address that SSH came in on.
    assert (added["state_dir"], added["migration_address"]) == ("/var/lib/vmckpt", "127.0.0.1")
    entry = json.loads((operator.state_dir / "hosts/a.json").read_text())
    assert (entry["kind"], entry["bridge"], entry["migration_ports"]) == (
        "ssh", "br7", [50000, 50009],
    )  # fmt: skip
    code, added = operator.add(
        "b", "--state-dir", str(tmp_path / "b"), "--migration-addr", "192.0.2.7"
    )
    assert (added["state_dir"], added["migration_address"]) == (str(tmp_path / "b"), "192.0.2.7")
    assert added["second_address"] is None  # SSH came in on the loopback: no one else's
    code, refused = operator.add("a")
    assert (code, refused["error"]["kind"]) == (4, "refused")
    assert operator.vmckpt("host", "remove", "a") == (0, {"name": "a", "removed": True})
    assert operator.vmckpt("host", "remove", "a")[0] == 3
    assert operator.vmckpt("host", "remove", "local")[0] == 4
    names = [host["name"] for host in operator.vmckpt("host", "list")[1]["hosts"]]
    assert names == ["local", "b"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("a", "ssh://root@127.0.0.1:1"), 6),
        (("a b", "ssh://root@127.0.0.1"), 2),
        (("local", "ssh://root@127.0.0.1"), 4),
        (("a", "http://127.0.0.1"), 2),
    ],
)
def test_what_cannot_be_added_leaves_nothing(
    operator: Operator, words: tuple[str, ...], code: int
) -> None:
    assert operator.vmckpt("host", "add", *words)[0] == code
    assert not list(operator.state_dir.rglob("*.json"))


def test_one_machine_is_added_once(operator: Operator, tmp_path: Path) -> None:
    """Its VMs were at home on two hosts: no command worked on them, `local`'s neither."""
    there = ("--state-dir", str(tmp_path / "there"))
    assert operator.add("h1", *there)[0] == 0
    code, said = operator.add("h2", *there)
    assert code == 4
    assert said["error"]["what"] == "'h2' is the same host as 'h1'"
    assert "cloned from it: remove that file there" in said["error"]["remedy"]
    code, said = operator.add("h3", "--state-dir", str(operator.state_dir))
    assert code == 4
    assert said["error"]["what"] == "'h3' is the same host as 'local'"
    assert operator.add("h4", "--state-dir", str(tmp_path / "another"))[0] == 0
    hosts = operator.vmckpt("host", "list")[1]["hosts"]
    assert [host["name"] for host in hosts] == ["local", "h1", "h4"]


@pytest.mark.parametrize("option", ["--state-dir", "--libvirt"])
def test_a_path_that_is_relative_is_refused(operator: Operator, option: str) -> None:
    code, refused = operator.add("a", option, "some/where")
    assert (code, refused["error"]["kind"]) == (2, "usage")
    assert "'some/where' must be an absolute path" in refused["error"]["why"]
    assert not list(operator.state_dir.rglob("*.json"))
    assert operator.vmckpt("host", "list")[0] == 0


def test_an_address_that_is_empty_is_refused(operator: Operator) -> None:
    """As by a variable that is not set. No command could read the inventory from then on."""
    code, refused = operator.vmckpt("host", "set", "local", "--migration-addr", "")
    assert (code, refused["error"]["kind"]) == (2, "usage")
    assert operator.vmckpt("host", "list")[0] == 0


def test_what_a_host_lacks_is_told_with_what_mends_it(operator: Operator, tmp_path: Path) -> None:
    state = tmp_path / "a"
    lacking = ("--qemu", "/gone/qemu", "--bridge", "nobr9", "--libvirt", "/gone/libvirt-sock")
    operator.add("a", "--state-dir", str(state), *lacking)
    code, report = operator.vmckpt("host", "check", "a")
    assert (code, report["fit"]) == (4, False)
    checks = {check["code"]: check for check in report["checks"]}
    refused = {code for code, check in checks.items() if check["verdict"] == "refuse"}
    assert refused == {"qemu", "bridge", "libvirtd"}
    assert "apt-get install -y qemu-system-x86" in checks["qemu"]["remedy"]
    assert "vmckpt pki issue a" in checks["certificates"]["remedy"]
    assert "apt-get install -y libvirt-daemon-system" in checks["libvirtd"]["remedy"]
    assert checks["state-dir"]["verdict"] == checks["clock"]["verdict"] == "ok"
    for check in checks.values():
        if check["verdict"] != "ok":
            assert check["remedy"]
            subprocess.run(["bash", "-n", "-c", check["remedy"]], check=True)
    assert report["memory_available_bytes"] > 0


def test_an_address_that_is_not_the_hosts_is_found(operator: Operator, tmp_path: Path) -> None:
    operator.add("a", "--state-dir", str(tmp_path / "a"), "--migration-addr", "192.0.2.7")
    report = operator.vmckpt("host", "check", "a")[1]
    [address] = [check for check in report["checks"] if check["code"] == "address"]
    assert (address["verdict"], address["reason"]) == ("refuse", "192.0.2.7 is not an address of a")


def test_a_pasted_remedy_mends_it(operator: Operator, tmp_path: Path) -> None:
    operator.add("a", "--state-dir", str(tmp_path / "a"), "--qemu", "/gone/qemu")
    state = tmp_path / "a/pki"

    def remedies() -> dict[str, str]:
        checks = operator.vmckpt("host", "check", "a")[1]["checks"]
        return {check["code"]: check["remedy"] for check in checks if check["verdict"] != "ok"}

    operator.paste(remedies()["certificates"])  # there is no authority yet, either
    assert {path.name for path in state.iterdir()} > {"ca-cert.pem", "server-cert.pem"}
    assert "certificates" not in remedies()
    path = operator.state_dir / "hosts/a.json"
    # Packages are not installed here.
    _, _, name_it = remedies()["qemu"].partition(" && ")
    operator.paste(name_it)
    assert json.loads(path.read_text())["qemu"] == "qemu-system-x86_64"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"migration_address": "192.0.2.7"}))
    operator.paste(remedies()["address"])
    assert "address" not in remedies()


def test_what_the_inventory_says_of_a_host_can_be_changed(operator: Operator) -> None:
    operator.add("a", "--bridge", "br7")
    path = operator.state_dir / "hosts/a.json"
    before = json.loads(path.read_text())
    words = ("--migration-addr", "192.0.2.9", "--migration-ports", "50000-50009")
    assert operator.vmckpt("host", "set", "a", *words)[0] == 0
    changed = {"migration_address": "192.0.2.9", "migration_ports": [50000, 50009]}
    assert json.loads(path.read_text()) == before | changed
    # At another address it has to answer.
    assert operator.vmckpt("host", "set", "a", "--address", "ssh://root@127.0.0.1:1")[0] == 6
    assert json.loads(path.read_text()) == before | changed
    assert operator.vmckpt("host", "set", "a", "--address", before["address"])[0] == 0
    for second, code in (("192.0.2.9", 2), ("198.51.100.9", 0)):
        assert operator.vmckpt("host", "set", "a", "--second-addr", second)[0] == code
    two = before | changed | {"second_address": "198.51.100.9"}
    assert json.loads(path.read_text()) == two
    assert operator.vmckpt("host", "set", "a", "--migration-addr", "198.51.100.9")[0] == 2
    assert operator.vmckpt("host", "set", "a", "--second-addr", "none")[0] == 0
    assert json.loads(path.read_text()) == before | changed
    assert operator.vmckpt("host", "set", "a")[0] == 2
    assert operator.vmckpt("host", "set", "a", "--libvirt", "no/path")[0] == 2
    assert operator.vmckpt("host", "set", "b", "--bridge", "br0")[0] == 3
    assert operator.vmckpt("host", "set", "local", "--bridge", "br0")[0] == 0
    assert operator.vmckpt("host", "set", "local", "--address", "ssh://x")[0] == 2
    [here, _] = operator.vmckpt("host", "list")[1]["hosts"]
    assert (here["name"], here["bridge"]) == ("local", "br0")


def test_a_doctor_sees_all_hosts_though_one_is_silent(operator: Operator, tmp_path: Path) -> None:
    operator.add("a", "--state-dir", str(tmp_path / "a"))
    operator.add("b", "--state-dir", str(tmp_path / "b"))
    path = operator.state_dir / "hosts/b.json"
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    entry = json.loads(path.read_text())
    path.write_text(json.dumps(entry | {"address": f"ssh://root@127.0.0.1:{port}"}))
    code, answer = operator.vmckpt("host", "doctor")
    assert code == 4
    by_name = {host["name"]: host["checks"] for host in answer["hosts"]}
    assert by_name.keys() == {"local", "a", "b"}
    assert [check["code"] for check in by_name["b"]] == ["reachable"]
    assert "nothing listens" in by_name["b"][0]["reason"]
    login, _, advice = by_name["b"][0]["remedy"].partition("  # ")
    assert (f"-p {port} root@127.0.0.1 true" in login, advice != "") == (True, True)
    assert len(by_name["a"]) > 5
    code, listed = operator.vmckpt("vm", "list")
    assert (code, len(listed["silent"])) == (0, 1)
    # On a host that is silent there may be one of any name.
    assert operator.vmckpt("vm", "show", "web")[0] == 6


def test_listing_hosts_asks_none_and_needs_no_ssh(operator: Operator) -> None:
    (operator.state_dir / "hosts").mkdir(parents=True)
    entry = {"kind": "ssh", "address": "ssh://nowhere.invalid", "state_dir": "/x",
             "migration_address": "192.0.2.1"}  # fmt: skip
    (operator.state_dir / "hosts/a.json").write_text(json.dumps(entry))
    code = (
        "import sys; from vmckpt.cli.main import main; sys.argv[1:] = ['host', 'list'];"
        "code = main(); assert 'paramiko' not in sys.modules; raise SystemExit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"VMCKPT_STATE_DIR": str(operator.state_dir)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "192.0.2.1" in done.stdout


def test_a_libvirtd_that_is_named_has_to_listen_and_can_be_left_out_again(
    operator: Operator, tmp_path: Path
) -> None:
    def libvirt() -> object:
        return operator.vmckpt("host", "list")[1]["hosts"][0]["libvirt"]

    path = tmp_path / "libvirt-sock"
    code, refused = operator.vmckpt("host", "set", "local", "--libvirt", str(path))
    assert (code, refused["error"]["kind"]) == (4, "refused")
    assert "--libvirt none" in refused["error"]["remedy"]
    assert libvirt() is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert operator.vmckpt("host", "set", "local", "--libvirt", str(path))[0] == 0
        assert libvirt() == str(path)
    for unset in ("none", ""):
        assert operator.vmckpt("host", "set", "local", "--libvirt", unset)[0] == 0
        assert libvirt() is None


def test_a_libvirtd_elsewhere_is_asked_there(operator: Operator, tmp_path: Path) -> None:
    operator.add("a", "--state-dir", str(tmp_path / "a"))
    code, refused = operator.vmckpt("host", "set", "a", "--libvirt", str(tmp_path / "gone"))
    assert (code, "listens at" in refused["error"]["what"]) == (4, True)
    assert operator.vmckpt("host", "set", "a", "--libvirt", "none")[0] == 0


def test_the_role_changes_of_a_host_only_what_it_knows_of_it(operator: Operator) -> None:
    """It removed the host and added it again: without its libvirtd, `drain` saw no domain there."""
    text = (Path(__file__).parents[2] / "ansible/roles/vmckpt/tasks/register.yml").read_text()
    assert " host remove " not in text
    assert " host rm {{" not in text.replace("(vmckpt host rm {{", "")
    tasks = re.findall(
        r"^- name: Change .*?command: >-\n(.*?)^  \w", text, re.DOTALL | re.MULTILINE
    )
    [template] = tasks
    kept = ("--qemu", "/opt/qemu", "--second-addr", "198.51.100.9")
    operator.add("a", "--bridge", "br0", *kept)
    path = operator.state_dir / "hosts/a.json"
    before = json.loads(path.read_text())
    second = before["second_address"]
    for bridge, address in (("br1", "192.0.2.9"), ("", second)):
        wanted = {"address": before["address"], "migration_address": address}
        words = jinja2.Template(template).render(
            vmckpt_command="vmckpt", vmckpt_name="a", vmckpt_migration_ports=[50000, 50009],
            vmckpt_bridge=bridge, vmckpt_vm_users="", vmckpt_entry_wanted=wanted,
            vmckpt_entry=[{"second_address": second}],
        )  # fmt: skip
        assert operator.vmckpt(*shlex.split(words)[1:])[0] == 0
        changed = {"migration_address": address, "migration_ports": [50000, 50009]}
        changed |= {"bridge": bridge or None, "second_address": second if bridge else None}
        found = json.loads(path.read_text())
        assert {**before, **changed} == {**before, **dict.fromkeys(changed), **found}
