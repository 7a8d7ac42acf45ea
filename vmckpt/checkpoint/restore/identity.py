"""Inform a restored guest of the current time and its identity.

A running kernel keeps its own clock and MAC addresses: only the guest agent can change them. What
could not be changed is reported.
"""

from collections.abc import Sequence
from pathlib import Path

from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.errors import OperationFailedError, VmckptError
from vmckpt.hosts.host import Host
from vmckpt.qemu.agent import GuestAgent
from vmckpt.vm.argv import macs
from vmckpt.vm.spec.spec import Spec

_IP = ("/sbin/ip", "/bin/ip")
# Per answer: a resumed guest, and its agent, fetch pages as they touch them.
_ANSWER_S = 10.0


def new_macs(facts: CheckpointFacts, spec: Spec) -> list[tuple[str, str]]:
    """The NICs' old and new addresses, where they differ."""
    pairs = zip(facts.macs, macs(spec), strict=False)
    return [(old.lower(), new.lower()) for old, new in pairs if old.lower() != new.lower()]


async def tell_guest(
    host: Host, agent: Path, facts: CheckpointFacts, spec: Spec, *, plugged: bool
) -> list[str]:
    """Inform a resumed guest; returns what could not be delivered, in words."""
    changed = new_macs(facts, spec)
    if not spec.guest_agent:
        return [_no_clock("it has no guest agent"), *_no_macs(changed, "no guest agent", plugged)]
    try:
        session = await GuestAgent.connect(await host.connect(agent), _ANSWER_S)
    except VmckptError as exc:
        return [_no_clock(str(exc.why)), *_no_macs(changed, "its guest agent is silent", plugged)]
    unsaid: list[str] = []
    try:
        try:
            await session.set_time(_ANSWER_S)
        except VmckptError as exc:
            unsaid.append(_no_clock(exc.why))
        for one in changed:
            try:
                await _set_mac(session, *one)
            except VmckptError as exc:
                unsaid += _no_macs([one], exc.why, plugged)
    finally:
        await session.close()
    return unsaid


async def _set_mac(agent: GuestAgent, old: str, new: str) -> None:
    """Raises AgentSilentError, OperationFailedError."""
    names = {one.mac: one.name for one in await agent.interfaces(_ANSWER_S)}
    if new in names:
        return
    if old not in names:
        raise OperationFailedError(
            "the guest has no such NIC",
            why=f"none of its interfaces has {old}: {', '.join(names)}",
            remedy=f"set {new} on the right NIC, inside the guest",
        )
    await agent.run_first(_IP, ["link", "set", "dev", names[old], "address", new], _ANSWER_S)


def _no_clock(why: str) -> str:
    return (
        f"the guest's clock is as it was when the checkpoint was taken ({why}): "
        "set it inside, e.g. by chronyc makestep"
    )


def _no_macs(changed: Sequence[tuple[str, str]], why: str, plugged: bool) -> list[str]:
    also = ", which the VM that it is a copy of has too, on the same network" if plugged else ""
    return [
        f"the guest keeps MAC {old}{also}, until its next boot with {new} ({why})"
        for old, new in changed
    ]
