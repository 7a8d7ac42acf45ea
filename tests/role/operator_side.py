"""The operator of two bare hosts: logs in, runs the playbook, has vmckpt with an inventory."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.role.commands import output
from vmckpt.lab.state import LabHost

REPOSITORY = Path(__file__).resolve().parents[2]
PLAYBOOK_TIMEOUT_S = 900
VMCKPT = Path(sys.executable).with_name("vmckpt")
RECAP = re.compile(r"^(\S+) +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=0 ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Operator:
    """Who makes the lab's hosts ready, as `hosts` names them; `home` has the keys and the state.

    Ansible logs in as root with the lab's key; vmckpt as the role's user with the operator's own.
    """

    home: Path
    hosts: Mapping[str, LabHost]
    lab_keys: Path

    @property
    def env(self) -> dict[str, str]:
        """What the operator's commands run with."""
        return {"HOME": str(self.home), "VMCKPT_STATE_DIR": str(self.home / "state")}

    def make_keys(self) -> None:
        """The operator's own key, and the hosts' keys as known."""
        keys = self.home / ".ssh"
        keys.mkdir(mode=0o700, parents=True)
        output(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "id_ed25519")])
        (keys / "known_hosts").write_text((self.lab_keys / "known_hosts").read_text())

    def vmckpt(self, *words: str) -> str:
        """What the operator's vmckpt prints."""
        return output([str(VMCKPT), *words], env=self.env)

    def on(self, name: str, *argv: str, user: str = "root", stdin: str = "") -> str:
        """What a command on a host prints; as a user other than root with the operator's key."""
        key = self.lab_keys / "id" if user == "root" else self.home / ".ssh/id_ed25519"
        options = ["-F", "/dev/null", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"]
        options += ["-i", str(key), "-o", f"UserKnownHostsFile={self.lab_keys}/known_hosts"]
        there = f"{user}@{self.address(name)}"
        return output(["ssh", *options, there, *argv], stdin=stdin, timeout_s=300)

    def address(self, name: str) -> str:
        """Where the operator reaches a host."""
        address = self.hosts[name].ssh_address
        assert address
        return address

    def write_inventory(self, variables: Mapping[str, Mapping[str, Any]]) -> None:
        """Ansible's inventory: these variables for each host."""
        known = self.lab_keys / "known_hosts"
        everywhere = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.lab_keys / "id"),
            "ansible_ssh_common_args": f"-F /dev/null -o UserKnownHostsFile={known}",
            "vmckpt_authorized_keys": [(self.home / ".ssh/id_ed25519.pub").read_text()],
            "vmckpt_command": str(VMCKPT),
            "vmckpt_offline": True,
        }
        hosts = {
            name: {
                "ansible_host": self.address(name),
                "vmckpt_migration_address": host.migration_address,
                **variables[name],
            }
            for name, host in self.hosts.items()
        }
        inventory = {"all": {"vars": everywhere, "hosts": hosts}}
        (self.home / "hosts.json").write_text(json.dumps(inventory))

    def play(self, *options: str) -> dict[str, int]:
        """Run the playbook: how many tasks changed something, by host. It has to end well."""
        folder = REPOSITORY / "ansible"
        inventory = ["-i", str(self.home / "hosts.json")]
        argv = ["ansible-playbook", *inventory, str(folder / "site.yml"), *options]
        env = self.env | {
            "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
            "ANSIBLE_DISPLAY_OK_HOSTS": "false",
            "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "false",
            "ANSIBLE_NOCOLOR": "1",
        }
        recap = RECAP.findall(output(argv, env=env, timeout_s=PLAYBOOK_TIMEOUT_S))
        return {name: int(changed) for name, changed in recap}
