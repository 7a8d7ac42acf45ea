"""The network namespaces of a lab, each kept alive by one sleeping process."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vmckpt.deadlines import poll
from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.hosts.processes.process import identify
from vmckpt.lab.processes import reap, spawn, tool

_START_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Namespaces:
    """The namespaces created so far.

    `rootless`: one user namespace, the switch's, owns all of them. `pids`: the processes started
    here.
    """

    directory: Path
    rootless: bool = False
    pids: list[int] = field(default_factory=list)

    def enter(self, holder: int) -> tuple[str, ...]:
        """The prefix that runs a command in the namespace; the command keeps its pid."""
        return (*self._enter_user(holder), f"--net=/proc/{holder}/ns/net")

    def start(self, argv: Sequence[str], name: str) -> int:
        """Start a process that runs until `down`, its output in NAME.log; return its pid."""
        pid = spawn(argv, self.directory, self.log(name))
        self.pids.append(pid)
        return pid

    def log(self, name: str) -> Path:
        """The output file of the process started under that name."""
        return self.directory / f"{name}.log"

    async def make_switch(self) -> int:
        """Create the first namespace, if necessary in a user namespace; return its holder.

        Raises RefusedError with the kernel's reasons if neither is permitted.
        """
        reasons = []
        for rootless, options in ((False, ()), (True, ("--user", "--map-root-user"))):
            self.rootless = rootless
            name = "switch-user" if rootless else "switch"
            pid = self.start(_holder(*options), name)
            try:
                return await self._await_holder(pid, name)
            except OperationFailedError as exc:
                reasons.append(exc.why)
                reap([pid])
        raise RefusedError(
            "the lab's networks cannot be made here",
            why=f"directly: {reasons[0]}; in a user namespace: {reasons[1]}",
            remedy="run it as root, or allow user namespaces (sysctl user.max_user_namespaces,"
            " kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)",
        )

    async def make_hosts(self, switch: int, names: Sequence[str]) -> list[int]:
        """Create the hosts' namespaces; return their holders. Raises OperationFailedError."""
        into_user = self._enter_user(switch) if self.rootless else ()
        pids = [self.start([*into_user, *_holder()], name) for name in names]
        return [await self._await_holder(pid, name) for pid, name in zip(pids, names, strict=True)]

    def _enter_user(self, holder: int) -> tuple[str, ...]:
        nsenter = tool("nsenter")
        if not self.rootless:
            return (nsenter,)
        # Credentials are preserved: the user is root there already, and may not set groups.
        return (nsenter, f"--user=/proc/{holder}/ns/user", "--preserve-credentials")

    async def _await_holder(self, pid: int, name: str) -> int:
        """Wait until the process has its namespace, that is, has become `sleep`."""
        await poll(
            lambda: identify(pid) is None or _command_name(pid) == b"sleep\n",
            every_s=0.001,
            within_s=_START_TIMEOUT_S,
        )
        if _command_name(pid) == b"sleep\n":
            return pid
        raise OperationFailedError(
            "a network namespace could not be made",
            why=last_line(self.log(name)) or "no answer",
            remedy="fix the cause, and try again",
        )


def last_line(log: Path) -> str:
    """The last line of a process's output, "" if there is none."""
    with contextlib.suppress(OSError):
        return (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    return ""


def _command_name(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_bytes()
    return b""


def _holder(*options: str) -> list[str]:
    return [tool("unshare"), *options, "--net", tool("sleep"), "infinity"]
