"""Page tracking on the VM's host: runs `vmckpt observe` there, which answers once."""

import errno
from collections.abc import Mapping, Sequence
from typing import Any

from vmckpt.foreign import parse
from vmckpt.hosts.host import Host

OBSERVE, OBSERVE_DOMAIN = "observe", "observe-domain"
# Extra time for the command: interpreter start, and reading samples of memory.
BESIDES_S = 30.0
MOST_BYTES = 64 << 20


async def observe_there(
    host: Host, words: Sequence[str], for_s: float, command: str = OBSERVE
) -> Mapping[str, Any] | None:
    """The result of `vmckpt observe WORDS` on the host; None if the VM's lock was taken by another.

    Raises OSError as `memory.observe` does, also (ENOTSUP) if the host's vmckpt lacks the command;
    HostDownError.
    """
    done = await host.run([*await host.own_command(), command, *words], for_s + BESIDES_S)
    try:
        answer = parse(done.stdout, most_bytes=MOST_BYTES)
        if "errno" in answer:
            raise OSError(int(answer["errno"]), str(answer["why"]))
        found: Mapping[str, Any] | None = answer["found"]
    except (ValueError, KeyError, TypeError) as exc:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise OSError(errno.ENOTSUP, f"its vmckpt did not track pages: {why[0]}") from exc
    return found
