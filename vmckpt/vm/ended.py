"""Determine why a VM's QEMU ended unasked: from evidence, since no process waits for it.

QEMU logs when its vCPUs run and when they stop, and they stop before QEMU ends by itself. If they
ran to the end, a signal ended QEMU. The kernel sends SIGBUS when the file system has no room for a
page of guest memory; the file system is then still full, because the guest's memory stays until the
VM is started or removed.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import NotRequired, TypedDict

from vmckpt.codec import convert
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.spec.spec import Spec

_STATE, _RUNS = "vm_state_notify running ", "vm_state_notify running 1"
# The first line of a QEMU's log.
LOG_HEAD = "vmckpt: QEMU of"
# A page of guest memory may be a huge page.
_PAGE_BYTES = 2 << 20


class _Missing(TypedDict):
    """A pager's record of missing pages. `lost`: why one cannot be loaded."""

    lost: NotRequired[str | None]


def ran_to_the_end(log: str) -> bool:
    """Whether, by QEMU's log, the vCPUs were running when it ended. Pure."""
    states = [line for line in log.splitlines() if _STATE in line]
    return bool(states) and _RUNS in states[-1]


async def ending(host: Host, spec: Spec, files: QemuDir) -> str:
    """What ended the QEMU of `files`; "": it exited by itself, or on request.

    Raises HostDownError.
    """
    if not ran_to_the_end(await host.read_text(files.stderr) or ""):
        return ""
    if lost := _lost(await host.read_text(files.missing)):
        return (
            f"it was ended because a page of its checkpoint could not be read ({lost}): restore "
            "another checkpoint; `vmckpt checkpoint verify` says which are intact"
        )
    if not await host.exists(files.memory(spec.ram_dir)):
        return f"its QEMU and its memory are gone: {host.name} was restarted, or QEMU was killed"
    if await host.free_bytes(spec.ram_dir) < _PAGE_BYTES:
        return (
            f"its QEMU died of SIGBUS: {spec.ram_dir} on {host.name}, which holds its memory, "
            "is full"
        )
    words = await last_lines(host, files.stderr)
    return (
        f"a signal ended its QEMU while the guest ran ({words or 'no message'}): see the kernel's "
        f"log on {host.name}, which reports a SIGKILL if memory ran out"
    )


def _lost(text: str | None) -> str:
    """Why a missing page could not be loaded, if the pager says so."""
    with suppress(MalformedError):
        return convert(_Missing, parse(text or "{}")).get("lost") or ""
    return ""


async def last_lines(host: Host, stderr: Path) -> str:
    """The end of QEMU's stderr, without warnings: they say why nothing failed. May be empty."""
    lines = [
        line.partition("Z ")[2] or line
        for line in (await host.read_text(stderr) or "").splitlines()
        if line.strip() and not line.startswith(LOG_HEAD)
    ]
    lines = [line.partition(": ")[2] if line.startswith("qemu-system") else line for line in lines]
    lines = [line for line in lines if not line.startswith("vm_state_notify")]
    # Also "-mon chardev=c: warning: '-mon' is deprecated".
    telling = [line for line in lines if not re.search(r"(^|: )warning: ", line)]
    return "; ".join(telling[-3:])
