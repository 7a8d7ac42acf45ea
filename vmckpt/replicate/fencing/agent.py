"""Runs fencing agents: programs that stop a primary, and report success only if they have proof.

The contract, for authors of agents:

    AGENT [its own arguments] check     test whether it can fence; changes nothing
    AGENT [its own arguments] fence     fence

{host} in its arguments is the primary's host, by its name in the inventory. In the environment:

    VMCKPT_FENCE_VM, _HOST    the VM, and the primary's host by its name in the inventory
    VMCKPT_FENCE_HOLDER, _TERM    the primary by its name with the arbiter, and its term
    VMCKPT_FENCE_MACHINE      boot id and process namespace there
    VMCKPT_FENCE_PROCESSES    "PID:START ..." there: all that can let the guest's output out or
                              write its disks; START in clock ticks since boot
    VMCKPT_FENCE_TIMEOUT_S    the agent is killed after this time

Exit status 0: check - it can fence; fence - *proved*: none of these processes will ever act again
(they are seen to be gone, or the machine's power is seen to be off). Anything else, a timeout
included, proves nothing, and is not a reason to take over. The first line of standard output
says what was seen; standard error says what went wrong. Fencing what is already dead succeeds.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vmckpt.errors import OperationFailedError, TimedOutError
from vmckpt.hosts.processes.child import TooMuchSaidError, end_of, end_session
from vmckpt.hosts.processes.kernel import BOOT_ID
from vmckpt.lease.rule import Holding
from vmckpt.replicate.wire.messages import Process

TIMEOUT_S = 10.0
_MOST_SAID_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Target:
    """What to fence: the holder of the VM's term, its host, and the processes that act for it."""

    vm: str
    holding: Holding
    host: str
    machine: str
    processes: Sequence[Process]


@dataclass(frozen=True, slots=True)
class FencingProof:
    """The holder can no longer act. `evidence`: what the agent has seen, in its own words."""

    holding: Holding
    evidence: str


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent: its command line and its timeout."""

    argv: tuple[str, ...]
    timeout_s: float = TIMEOUT_S

    async def check(self, target: Target) -> str:
        """The agent's report about its means. Raises OperationFailedError: it cannot fence."""
        return await self._run("check", target)

    async def fence(self, target: Target) -> FencingProof:
        """Have the target killed. Raises OperationFailedError: nothing is proved."""
        return FencingProof(target.holding, await self._run("fence", target))

    async def _run(self, action: str, target: Target) -> str:
        pipe = asyncio.subprocess.PIPE
        argv = [word.replace("{host}", target.host) for word in self.argv]
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, action, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
                env=os.environ | _environment(target, self.timeout_s), start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as exc:  # the arbiter's record may hold what no text may
            raise self._failed(action, target, f"{self.argv[0]} does not start: {exc}") from exc
        try:
            output, complaints = await end_of(process, self.timeout_s)
        except TooMuchSaidError as exc:
            raise self._failed(action, target, str(exc)) from exc
        except TimeoutError:
            raise TimedOutError(
                f"fencing agent {self.argv[0]} did not answer for VM '{target.vm}'",
                why=f"it did not end within {self.timeout_s:g} s",
                remedy="check its network or power switch; nothing was proved",
            ) from None
        finally:
            end_session(process)  # with all that it started
        if process.returncode != 0:
            why = _line(complaints, -1) or f"it said nothing, with status {process.returncode}"
            raise self._failed(action, target, why)
        return _line(output, 0)

    def _failed(self, action: str, target: Target, why: str) -> OperationFailedError:
        return OperationFailedError(
            f"fencing agent {self.argv[0]} failed to {action} {target.host} for VM '{target.vm}'",
            why=why,
            remedy="check the agent; without its proof the primary's lease is waited out",
        )


def this_machine() -> str:
    """How an agent verifies that it sees the processes of this host and no other."""
    boot_id = BOOT_ID.read_text().strip()
    return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"


def _environment(target: Target, timeout_s: float) -> dict[str, str]:
    return {
        "VMCKPT_FENCE_VM": target.vm,
        "VMCKPT_FENCE_HOST": target.host,
        "VMCKPT_FENCE_HOLDER": target.holding.holder,
        "VMCKPT_FENCE_TERM": str(target.holding.term),
        "VMCKPT_FENCE_MACHINE": target.machine,
        "VMCKPT_FENCE_PROCESSES": " ".join(f"{p.pid}:{p.start_ticks}" for p in target.processes),
        "VMCKPT_FENCE_TIMEOUT_S": f"{timeout_s:g}",
    }


def _line(output: bytes, which: int) -> str:
    lines = output[-_MOST_SAID_BYTES:].decode(errors="replace").strip().splitlines()
    return lines[which].strip() if lines else ""
