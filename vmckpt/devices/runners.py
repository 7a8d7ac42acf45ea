"""The channels into a guest through which hooks are run: its QEMU guest agent, and SSH."""

import asyncio
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host
from vmckpt.hosts.ssh.address import Address
from vmckpt.qemu.agent import GuestAgent, GuestExit
from vmckpt.vm.paths import QemuDir

POLL_S, MOST_POLL_S = 0.02, 0.5
# While a hook runs, an answer may take this many times as long as the slowest one so far.
SLOWER = 4
SSH_CONNECT_S = 10
# After this many silent intervals of 5 s ssh(1) reports a connection as lost. Whatever the host's
# own configuration forwards, a guest gets none of it.
SSH_OPTIONS = ("BatchMode=yes", f"ConnectTimeout={SSH_CONNECT_S}", "ServerAliveInterval=5",
               "ServerAliveCountMax=3", "ForwardAgent=no", "ForwardX11=no",
               "ClearAllForwardings=yes")  # fmt: skip
SSH_FAILED = 255


class GuestRunner(Protocol):
    """Runs programs in a guest."""

    async def run(self, argv: Sequence[str], given: bytes, within_s: float) -> GuestExit | None:
        """Run a program with `given` as input; None: it still runs after `within_s`.

        Raises NoProgramError (the guest cannot run it by this channel), HostDownError (no answer),
        OperationFailedError.
        """


@dataclass(frozen=True, slots=True)
class ByAgent:
    """By a QEMU's guest agent; each of its answers is waited for up to `patience_s`.

    Or longer, if its earlier answers suggest that: starting the hook again because the guest is
    slow would make the guest slower. It is queried for at most half of the time.
    """

    host: Host
    files: QemuDir
    patience_s: float

    async def run(self, argv: Sequence[str], given: bytes, within_s: float) -> GuestExit | None:
        """As GuestRunner.run."""
        sock, sent_s = await self.host.connect(self.files.agent), time.monotonic()
        agent = await GuestAgent.connect(sock, self.patience_s)
        try:
            pid = await agent.start(argv, self.patience_s, given=given)
            deadline, poll_s, longest_s = time.monotonic() + within_s, POLL_S, 0.0
            while time.monotonic() < deadline:
                took_s = time.monotonic() - sent_s
                longest_s = max(longest_s, took_s)
                await asyncio.sleep(max(poll_s, took_s))
                poll_s, sent_s = min(2 * poll_s, MOST_POLL_S), time.monotonic()
                if done := await agent.ended(pid, max(self.patience_s, SLOWER * longest_s)):
                    return done
            return None
        finally:
            await agent.close()


@dataclass(frozen=True, slots=True)
class BySsh:
    """By ssh(1) on the guest's host, as the host's user, whose key the guest knows."""

    host: Host
    address: Address

    async def run(self, argv: Sequence[str], given: bytes, within_s: float) -> GuestExit | None:
        """As GuestRunner.run."""
        there = self.address
        options = [word for option in SSH_OPTIONS for word in ("-o", option)]
        options += ["-l", there.user] if there.user else []
        options += ["-p", str(there.port)] if there.port else []
        line = f"printf %s {shlex.quote(given.decode())} | {shlex.join(argv)}"
        words = ["ssh", *options, "--", there.host, line]
        done = await self.host.run(words, timeout_s=within_s + SSH_CONNECT_S)
        if done.returncode == SSH_FAILED and not done.stdout:
            raise HostDownError(
                f"the guest cannot be reached by SSH at {there} from {self.host.name}",
                why=done.stderr.strip()[-400:] or "ssh does not say why",
                remedy=f"try it on {self.host.name}: {shlex.join(words[:-1])}",
            )
        return GuestExit(done.returncode, done.stdout.encode(), done.stderr.encode())


def runners_of(
    host: Host, files: QemuDir, ssh: Address | None, patience_s: float
) -> tuple[GuestRunner, ...]:
    """The channels into a guest, in the order of use; `patience_s` is the agent's."""
    agent = ByAgent(host, files, patience_s)
    return (agent, BySsh(host, ssh)) if ssh else (agent,)
