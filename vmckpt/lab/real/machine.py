"""The description of a host that looks like a machine, as its first process reads it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

# A host's own directories: the same paths on every host, with different folders behind them.
STATE_DIR = Path("/var/lib/vmckpt")
OPERATOR_KEY = "operator.pub"
HOST_KEY = "host_key"
SSH_PORT = 22


@dataclass(frozen=True, slots=True)
class LabMachine:
    """The plan of a host.

    `folder`: its folder on this machine: `ssh` with its keys, and the content of its directories.
    `packages`: see images/hosts.py. `seen`: folders of this machine that it sees, read-only, at the
    same path; `shared`: one that all hosts see and write. `programs`: paths that are links to
    programs. `names`: every host's, with the address that its name stands for.
    `bare`: Debian and sshd, nothing else: no QEMU, no libvirt, no vmckpt, no state.
    """

    name: str
    folder: Path
    packages: Path
    uuid: str
    address: str
    migration_address: str
    shared: Path
    seen: tuple[Path, ...]
    programs: dict[str, str]
    names: dict[str, str]
    bare: bool

    @property
    def plan(self) -> Path:
        """The file that tells the first process what to set up."""
        return self.folder / "machine.json"

    @property
    def keys(self) -> Path:
        """The folder with HOST_KEY and OPERATOR_KEY."""
        return self.folder / "ssh"


def write_plan(machine: LabMachine) -> None:
    """Write `machine.plan`."""
    machine.plan.write_text(json.dumps(asdict(machine), default=str, indent=1))


def read_plan(path: Path) -> LabMachine:
    """Read what `write_plan` wrote."""
    plan = json.loads(path.read_bytes())
    for name in ("folder", "packages", "shared"):
        plan[name] = Path(plan[name])
    plan["seen"] = tuple(Path(path) for path in plan["seen"])
    return LabMachine(**plan)
