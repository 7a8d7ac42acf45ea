"""One phase of a hook, run in the guest by its agent: to its end, or to the end of its time."""

import asyncio
import time
from dataclasses import dataclass

from vmckpt.devices.contract import LIMITS_S, Answer, Phase, read_answer, request
from vmckpt.errors import HostDownError, OperationFailedError
from vmckpt.hosts.host import Host
from vmckpt.qemu.agent import GuestAgent, GuestExit, NoProgramError
from vmckpt.vm.passthrough import Passthrough
from vmckpt.vm.paths import QemuDir

# A killed agent's successor, and one whose guest has just arrived, are waited for.
AGENT_BACK_S = 20.0
POLL_S, MOST_POLL_S = 0.02, 0.5
# The guest ends a hook when its time is over; so much later nobody waits for that any more.
GRACE_S = 5.0
KILLED = (137, -9)
NO_SUCH_PROGRAM = 127
BETWEEN_S = 0.2


class HookFailedError(OperationFailedError):
    """A phase did not do what it promises."""


@dataclass(frozen=True, slots=True)
class GuestHook:
    """The hook of one device, in the guest of one QEMU; `run` is the operation that asks."""

    host: Host
    files: QemuDir
    device: Passthrough
    run: str

    async def do(self, phase: Phase, *, tries: int = 1) -> Answer:
        """Have the hook do a phase; its answer, which is well.

        What failed is tried again so often as `tries` says, an agent that was lost meanwhile is
        waited for in any case. Raises HookFailedError.
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
                remedy=answer.remedy or f"run it in the guest by hand: {self.device.hook} {phase}",
            )
        return answer

    async def _outlasting(self, phase: Phase) -> Answer:
        """The phase, begun anew where the agent died over it."""
        limit_s = self.device.limits_s.get(phase, LIMITS_S[phase])
        lost_s: float | None = None
        while True:
            try:
                return await self._once(phase, limit_s)
            except NoProgramError as exc:
                remedy = f"the guest needs `timeout` and {self.device.hook}"
                return Answer(False, f"{exc.what}: {exc.why}", remedy)
            except (HostDownError, OperationFailedError) as exc:
                # The second: another agent, which knows nothing of the hook that the first began.
                lost_s = lost_s or time.monotonic()
                if time.monotonic() > lost_s + AGENT_BACK_S:
                    remedy = "see whether the guest runs, and its agent in it"
                    return Answer(False, f"{exc.what}: {exc.why}", remedy)
            await asyncio.sleep(BETWEEN_S)

    async def _once(self, phase: Phase, limit_s: int) -> Answer:
        agent = await GuestAgent.connect(await self.host.connect(self.files.agent))
        try:
            # The guest's own `timeout` ends it: nobody else could, should the connection be lost.
            argv = ["timeout", "-s", "KILL", str(limit_s), str(self.device.hook), phase.value]
            told = request(self.device.id, self.run, limit_s)
            done = await _ended(agent, await agent.start(argv, given=told), limit_s + GRACE_S)
        finally:
            await agent.close()
        if done is None or done.returncode in KILLED:
            remedy = f"give it more: limits_s = {{ {phase} = N }} in the spec"
            return Answer(False, f"it was not done within {limit_s} s", remedy)
        if done.returncode == NO_SUCH_PROGRAM:
            return Answer(False, f"the guest has no program {self.device.hook}", "put it there")
        return read_answer(*done)


async def _ended(agent: GuestAgent, pid: int, within_s: float) -> GuestExit | None:
    deadline, poll_s = time.monotonic() + within_s, POLL_S
    while time.monotonic() < deadline:
        if done := await agent.ended(pid):
            return done
        await asyncio.sleep(poll_s)
        poll_s = min(2 * poll_s, MOST_POLL_S)
    return None
