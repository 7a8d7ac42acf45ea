"""How a VM's QEMU ended that was not asked to: by evidence, since no process waits for it.

QEMU writes to its log when its vCPUs run and when they stop, which they do before it ends in any
way of its own. Where they ran to the end it was ended by a signal. SIGBUS is what the kernel sends
where a page of the guest's memory finds no room in its file system, which is then full still: what
the guest had there stays until the VM is started or removed.
"""

from contextlib import suppress
from dataclasses import dataclass

from vmckpt.codec import convert
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.spec.spec import Spec
from vmckpt.vm.start import last_words

_STATE, _RUNS = "vm_state_notify running ", "vm_state_notify running 1"
# A page of a guest's memory may be a huge one.
_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class _Missing:
    """What a pager says of the pages that are still to come. `lost`: why one cannot be had."""

    lost: str | None = None


def ran_to_the_end(log: str) -> bool:
    """Whether by a QEMU's log the guest's vCPUs ran when it ended. Pure."""
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
            f"it was ended, since a page could not be had from its checkpoint ({lost}): restore "
            "another one; `vmckpt checkpoint verify` says which are whole"
        )
    if not await host.exists(files.memory(spec.ram_dir)):
        return f"its QEMU is gone with its memory: {host.name} was restarted, or it was killed"
    if await host.free_bytes(spec.ram_dir) < _PAGE_BYTES:
        return (
            f"its QEMU died of SIGBUS: {spec.ram_dir} on {host.name}, where its memory is, is full"
        )
    words = await last_words(host, files.stderr)
    return (
        f"its QEMU was ended by a signal while the guest ran ({words or 'it says nothing'}): "
        f"see the kernel's log of {host.name}, which tells of SIGKILL where memory ran out"
    )


def _lost(told: str | None) -> str:
    """Why a page that was still to come did not, if that is what its pager says."""
    with suppress(MalformedError):
        return convert(_Missing, parse(told or "{}")).lost or ""
    return ""
