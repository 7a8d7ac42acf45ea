"""Runs one phase of a hook in the guest, to its end or its time limit."""

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from vmckpt.devices.contract import LIMITS_S, HookAnswer, HookPhase, read_answer, request
from vmckpt.errors import HostDownError, OperationFailedError
from vmckpt.hosts.host import Host
from vmckpt.vm.passthrough.passthrough import Passthrough
from vmckpt.vm.paths import QemuDir

if TYPE_CHECKING:
    from vmckpt.devices.runners import GuestRunner

# How long to wait for a killed agent's successor, or a guest that has just arrived; and for each of
# an agent's answers, doubled at each try: so one that is always slow is heard eventually.
BACK_S, PATIENCE_S = 20.0, 5.0
# The guest ends a hook at its time limit; the host waits at most this much longer.
GRACE_S = 5.0
KILLED = (137, -9)
NO_SUCH_PROGRAM = 127
BETWEEN_S = 0.2


class HookFailedError(OperationFailedError):
    """A phase failed."""


class GuestHook(NamedTuple):
    """The hook of one device, in the guest of one QEMU; `run` is the operation's id."""

    host: Host
    files: QemuDir
    device: Passthrough
    run: str

    async def do(self, phase: HookPhase, *, tries: int = 1) -> HookAnswer:
        """Have the hook do a phase; returns its answer, which is positive.

        A failure is retried up to `tries` times; a lost agent is always waited for.
        Raises HookFailedError.
        """
        answer = await self._outlasting(phase)
        while not answer.ok and tries > 1:
            tries -= 1
            await asyncio.sleep(BETWEEN_S)
            answer = await self._outlasting(phase)
        if not answer.ok:
            raise HookFailedError(
                f"the hook of '{self.device.id}' failed in phase {phase}",
                why=answer.why,
                remedy=self._advice(answer, phase),
            )
        return answer

    def _advice(self, answer: HookAnswer, phase: HookPhase) -> str:
        """Mark a remedy as the guest's own: it must not be run here unread."""
        if answer.remedy and answer.from_guest:
            return f"the hook in the guest proposes: {answer.remedy}"
        import shlex

        by_hand = shlex.join([str(self.device.hook), phase])
        return answer.remedy or f"run it in the guest by hand: {by_hand}"

    async def _outlasting(self, phase: HookPhase) -> HookAnswer:
        """Run the phase; start it again if the connection to the guest is lost meanwhile."""
        # Imported here, since only VMs with devices need them.
        from vmckpt.devices.runners import runners_of
        from vmckpt.qemu.agent import NoProgramError

        limit_s = self.device.limits_s.get(phase, LIMITS_S[phase])
        patience_s, lost_s = PATIENCE_S, None
        while True:
            reasons, final = [], True
            for runner in runners_of(self.host, self.files, self.device.ssh, patience_s):
                try:
                    return await self._once(runner, phase, limit_s)
                except NoProgramError as exc:
                    reasons.append(f"{exc.what}: {exc.why}")
                except (HostDownError, OperationFailedError) as exc:
                    # The second: another agent, which does not know the hook that was started.
                    reasons.append(f"{exc.what}: {exc.why}")
                    final = False
            if final:
                remedy = f"the guest needs `timeout` and {self.device.hook}"
                return HookAnswer(False, "; ".join(reasons), remedy)
            lost_s = lost_s or time.monotonic()
            if time.monotonic() > lost_s + BACK_S:
                remedy = "see whether the guest runs, and in it the agent or sshd"
                return HookAnswer(False, "; ".join(reasons), remedy)
            patience_s *= 2
            await asyncio.sleep(BETWEEN_S)

    async def _once(self, runner: "GuestRunner", phase: HookPhase, limit_s: int) -> HookAnswer:
        # The guest's own `timeout` ends it: nothing else could if the connection is lost.
        argv = ["timeout", "-s", "KILL", str(limit_s), str(self.device.hook), phase.value]
        message = request(self.device.id, self.run, limit_s)
        done = await runner.run(argv, message, limit_s + GRACE_S)
        if done is None or done.returncode in KILLED:
            remedy = f"give it more: limits_s = {{ {phase} = N }} in the spec"
            return HookAnswer(False, f"it was not done within {limit_s} s", remedy)
        if done.returncode == NO_SUCH_PROGRAM:
            return HookAnswer(False, f"the guest has no program {self.device.hook}", "put it there")
        return read_answer(*done)
