"""The description of a lab, and its record on disk.

Everything is in STATE/lab: `lab.json` (written last, so a directory without it is an incomplete
lab), `observer/socket`, the holders' output, and one directory per host: its state, or what is
behind the directories of one that looks like a machine. Removing a lab does not need the record:
see processes.py.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vmckpt.errors import NotFoundError, RefusedError
from vmckpt.hosts.processes.process import ProcessId, is_alive

HOST_PREFIX = "lab-"
# sockaddr_un.sun_path holds 108 bytes with the terminating zero (unix(7)); the longest path that a
# host needs below its state directory is vms/NAME/qemu-ID/watch.sock and the like.
_UNIX_PATH_MAX_BYTES = 107
_ROOM_FOR_VM_BYTES = 48


@dataclass(frozen=True, slots=True)
class LabHost:
    """A host of the lab: a network namespace and a state directory of its own.

    `enter`: the prefix that runs a command in the namespace; the command keeps its pid. For a host
    that looks like a machine it enters only the network, `state_dir` is the host's own path, and
    `ssh_address` is where the operator logs in, see `ssh_config`. `second_address` is on another
    network than the first: the guests', or the operator's.
    """

    name: str
    holder: ProcessId
    enter: tuple[str, ...]
    state_dir: Path
    migration_address: str
    qemu: Path
    second_address: str
    ssh_address: str | None = None

    @property
    def letter(self) -> str:
        """The letter that distinguishes this host's interfaces."""
        return self.name.removeprefix(HOST_PREFIX)


@dataclass(frozen=True, slots=True)
class Lab:
    """A lab that is up.

    `client_enter` enters the outside client's namespace on the guests' network (10.77.0.254), where
    the heartbeat observer runs and answers on the unix socket `heartbeats`. `rootless`: a user
    namespace owns the network namespaces. `bare`: hosts that look like machines and have neither
    QEMU nor vmckpt; they are not in the inventory.
    """

    directory: Path
    rootless: bool
    client: ProcessId
    client_enter: tuple[str, ...]
    observer: ProcessId
    heartbeats: Path
    hosts: tuple[LabHost, ...]
    bare: bool = False

    def host(self, name: str) -> LabHost:
        """Find the host of that name. Raises NotFoundError."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise NotFoundError(
            f"no host '{name}' in the lab",
            why="it has " + ", ".join(host.name for host in self.hosts),
            remedy="name one of these",
        )


def lab_directory(state_dir: Path) -> Path:
    """The lab directory of a state directory, whether it exists or not; absolute, without links."""
    return state_dir.resolve() / "lab"


def heartbeats_socket(directory: Path) -> Path:
    """The socket on which the observer of the lab in `directory` answers; alone in its folder."""
    return directory / "observer/socket"


def ssh_config(directory: Path) -> Path:
    """The configuration with which ssh(1) logs in to hosts that look like machines, by name."""
    return directory / "ssh/config"


def check_path_lengths(directory: Path) -> None:
    """Raises RefusedError if a VM's sockets could not be bound below `directory`."""
    used_bytes = len(bytes(directory / f"{HOST_PREFIX}a"))
    if used_bytes + _ROOM_FOR_VM_BYTES > _UNIX_PATH_MAX_BYTES:
        most = _UNIX_PATH_MAX_BYTES - _ROOM_FOR_VM_BYTES - len(f"/lab/{HOST_PREFIX}a")
        raise RefusedError(
            "the lab cannot be made here",
            why=f"below {directory} the paths of unix sockets get longer than the kernel allows",
            remedy=f"set VMCKPT_STATE_DIR to a directory of at most {most} bytes",
        )


def read(state_dir: Path) -> Lab | None:
    """The running lab, or None if there is none.

    Raises RefusedError if it is incomplete: half created, or some of its processes are gone.
    """
    directory = lab_directory(state_dir)
    if not directory.exists():
        return None
    try:
        lab = _decode(directory, json.loads((directory / "lab.json").read_bytes()))
    except FileNotFoundError:
        raise _in_pieces("it was not made, or not taken down, to the end") from None
    except (ValueError, KeyError, TypeError) as exc:
        raise _in_pieces(f"its record is damaged: {exc!r}") from exc
    for process in (lab.client, lab.observer, *(host.holder for host in lab.hosts)):
        if not is_alive(process):
            raise _in_pieces(f"its process {process.pid} is gone (killed, or a reboot)")
    return lab


def _in_pieces(why: str) -> RefusedError:
    return RefusedError("the lab is incomplete", why=why, remedy="run 'vmckpt lab down'")


def write_record(lab: Lab) -> None:
    """Record the lab: from now on `read` finds it."""
    replace_file(lab.directory / "lab.json", json.dumps(asdict(lab), default=str, indent=1))


def _decode(directory: Path, record: dict[str, Any]) -> Lab:
    return Lab(
        directory=directory,
        rootless=bool(record["rootless"]),
        client=ProcessId(**record["client"]),
        client_enter=tuple(record["client_enter"]),
        observer=ProcessId(**record["observer"]),
        heartbeats=heartbeats_socket(directory),
        hosts=tuple(_decode_host(host) for host in record["hosts"]),
        bare=bool(record["bare"]),
    )


def _decode_host(record: dict[str, Any]) -> LabHost:
    return LabHost(
        name=record["name"],
        holder=ProcessId(**record["holder"]),
        enter=tuple(record["enter"]),
        state_dir=Path(record["state_dir"]),
        migration_address=record["migration_address"],
        qemu=Path(record["qemu"]),
        second_address=record["second_address"],
        ssh_address=record["ssh_address"],
    )


def replace_file(path: Path, text: str) -> None:
    """Write a private file atomically."""
    new = path.with_name(f".{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    new.replace(path)
