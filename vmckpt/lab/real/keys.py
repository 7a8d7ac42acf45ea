"""The SSH keys of a lab: the operator's, and the hosts', which are known beforehand.

All in LAB/ssh: `id`, `known_hosts`, and `config` for logins (ssh -F LAB/ssh/config lab-a).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from vmckpt.lab.processes import run
from vmckpt.lab.real.machine import HOST_KEY, OPERATOR_KEY, SSH_PORT, LabMachine
from vmckpt.lab.state import replace_file, ssh_config


async def make_keys(directory: Path, machines: Sequence[LabMachine]) -> None:
    """Create the operator's key and every host's, and make them known to each other.

    Raises OperationFailedError.
    """
    keys = directory / "ssh"
    for folder in (keys, *(machine.keys for machine in machines)):
        folder.mkdir(mode=0o700)
    packages = machines[0].packages / "usr"
    keygen = ["env", f"LD_LIBRARY_PATH={packages}/lib/x86_64-linux-gnu"]
    keygen += [str(packages / "bin/ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", ""]
    files = [keys / "id", *(machine.keys / HOST_KEY for machine in machines)]
    await asyncio.gather(*(run([*keygen, "-f", str(file)], directory) for file in files))
    for machine in machines:
        (machine.keys / OPERATOR_KEY).write_text(_public(keys / "id"))
    known = [f"{machine.address} {_public(machine.keys / HOST_KEY)}" for machine in machines]
    replace_file(keys / "known_hosts", "".join(known))
    replace_file(
        ssh_config(directory), "\n".join(_config(directory, machine) for machine in machines)
    )


def _public(key: Path) -> str:
    return key.with_name(f"{key.name}.pub").read_text()


def _config(directory: Path, machine: LabMachine) -> str:
    return f"""\
Host {machine.name}
    HostName {machine.address}
    Port {SSH_PORT}
    User root
    IdentityFile {directory}/ssh/id
    IdentitiesOnly yes
    UserKnownHostsFile {directory}/ssh/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""
