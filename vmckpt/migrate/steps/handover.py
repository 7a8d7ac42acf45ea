"""Make one host the VM's home and clean up the other: the ends of every migration."""

import operator
from contextlib import suppress
from pathlib import Path

from vmckpt.deadlines import poll
from vmckpt.errors import HostDownError, OutcomeUnknownError
from vmckpt.hosts.host import Host
from vmckpt.migrate.outcome.ends import End, discard
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.start import foreign_process, processes

QUIT_S, QUIT_POLL_S = 5.0, 0.01


async def settle_on_destination(destination: End, qemu: Qemu, source: Host) -> None:
    """Make the destination the VM's home; from here on the source's files only wait for removal."""
    name = destination.files.vm_name
    await destination.host.write_text(
        vm_dir(destination.host.state_dir, name).current, qemu.to_json()
    )
    await source.remove(vm_dir(source.state_dir, name).current)


async def release(end: End, ram_dir: Path) -> None:
    """The VM is at home elsewhere: end its QEMU on this host and remove its files here."""
    await _ask_to_quit(end)
    # The guest runs elsewhere: do not wait for the kernel to free its old memory.
    await discard(end, ram_dir, await_freed=False)
    await end.host.remove(vm_dir(end.host.state_dir, end.files.vm_name).path)


async def _ask_to_quit(end: End) -> None:
    """End an adopted QEMU by `quit`, if possible.

    It then removes its own sockets and pid file, and a supervisor sees no failure.
    """
    process = await foreign_process(end.host, end.files)
    if process is None:
        return
    with suppress(HostDownError, OutcomeUnknownError, CommandRefusedError):
        await commands.quit_(await end.monitor())
    await poll(
        lambda: end.host.is_alive(process), operator.not_, every_s=QUIT_POLL_S, within_s=QUIT_S
    )


async def find_qemu(end: End, platform: Platform) -> Qemu | None:
    """The running QEMU of an end as vm.json records it; None if it has ended."""
    found = await processes(end.host, end.files)
    return Qemu(end.files, found[0], platform) if found else None
