"""Probe a host's QEMU, once per binary, and the accelerators that it can use."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from vmckpt.codec import builtins, convert
from vmckpt.errors import HostDownError, OperationFailedError, RefusedError, UsageError
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Executable, Host
from vmckpt.qemu import commands
from vmckpt.qemu.abilities import Abilities, learn
from vmckpt.qemu.monitor import Monitor, MonitorLostError
from vmckpt.vm.ended import last_lines
from vmckpt.vm.start import greeted

VIRTUALIZATION_FLAGS = frozenset({"vmx", "svm"})
DEV_KVM = Path("/dev/kvm")
# The default machine of a spec.
MACHINE = "q35"
VERSION_TIMEOUT_S = 10.0
_MOST_CACHED_BYTES = 16 << 20
T = TypeVar("T")


async def abilities(host: Host) -> Abilities:
    """The abilities of the host's QEMU; the first query of a binary starts it for about 0.2 s.

    Raises RefusedError if the host has no QEMU, HostDownError if it does not come up.
    """
    binary = await _binary(host)
    identity = f"{binary.path}:{binary.mtime_ns}:{binary.size_bytes}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    cache = host.state_dir / "cache" / f"qemu-{key}.json"
    if text := await host.read_text(cache):
        try:
            return convert(Abilities, parse(text, most_bytes=_MOST_CACHED_BYTES))
        except MalformedError:
            await host.remove(cache)  # another version's cache: overwritten below
    found = await _ask_bare_qemu(host, "none", "tcg", learn)
    await host.make_dir(cache.parent)
    await host.write_text(cache, json.dumps(builtins(found)))
    return found


async def require_qemu(host: Host) -> Abilities:
    """Check that the host's QEMU binary is one; returns its abilities.

    Raises UsageError if it is not QEMU, or cannot run x86-64 guests as vmckpt needs them.
    """
    try:
        output = await host.run([host.qemu, "--version"], VERSION_TIMEOUT_S)
        first = output.stdout.partition("\n")[0]
        if output.returncode or not first.startswith("QEMU emulator version"):
            words = first or output.stderr.partition("\n")[0] or "nothing"
            raise _no_qemu(host, f"its answer to --version is: {words[:200]}")
        found = await abilities(host)
    except (HostDownError, OperationFailedError) as exc:
        raise _no_qemu(host, f"{exc.what}: {exc.why}") from exc
    if MACHINE not in found.machines:
        raise _no_qemu(host, f"it has no machine '{MACHINE}': it is for other guests than x86-64")
    return found


def _no_qemu(host: Host, why: str) -> UsageError:
    return UsageError(
        f"'{host.qemu}' is not a QEMU that runs x86-64 guests",
        why=why,
        remedy="name the path of a qemu-system-x86_64",
    )


async def choose_accel(host: Host, requested: str) -> tuple[str, str]:
    """The accelerator for a new VM ("kvm" or "tcg") and the reason.

    Raises RefusedError if the requested one is impossible.
    """
    obstacle = await kvm_obstacle(host) if requested != "tcg" else "the spec asks for tcg"
    if obstacle is None:
        return "kvm", "the host's KVM runs guests"
    if requested == "kvm":
        raise RefusedError(
            f"KVM is not usable on {host.name}",
            why=obstacle,
            remedy='use accel = "tcg" (slow) or "auto", or a host with hardware virtualization',
        )
    return "tcg", obstacle


async def kvm_obstacle(host: Host) -> str | None:
    """Why KVM cannot run a guest on this host; None: it can."""
    if not await host.exists(DEV_KVM):
        return "there is no /dev/kvm"
    if not await host.usable(DEV_KVM):
        return "this user may not open /dev/kvm"
    if not VIRTUALIZATION_FLAGS & await host.cpu_flags():
        return "the processor has neither vmx nor svm, and guests hang on the KVM that is offered"
    try:
        enabled = await _ask_bare_qemu(host, "q35", "kvm", commands.query_kvm)
    except (HostDownError, OperationFailedError) as exc:
        return f"QEMU does not start with KVM: {exc.why}"
    return None if enabled else "QEMU started without KVM"


async def _binary(host: Host) -> Executable:
    """The binary that host.qemu names. Raises RefusedError, HostDownError."""
    if found := await host.find_executable(host.qemu):
        return found
    from vmckpt.installing import OS_RELEASE, Need, advice

    await host.require_up()  # on one that is down there is nothing
    raise RefusedError(
        f"{host.name} has no QEMU",
        why=f"'{host.qemu}' is not there or not executable",
        remedy=f"install it: {advice(Need.QEMU, await host.read_text(OS_RELEASE) or '')}",
    )


async def _ask_bare_qemu(
    host: Host, machine: str, accel: str, question: Callable[[Monitor], Awaitable[T]]
) -> T:
    """Ask a QEMU without a guest. If it hangs up meanwhile, ask another one.

    Raises HostDownError if that one does too, OperationFailedError if QEMU does not start.
    """
    try:
        async with _bare_qemu(host, machine, accel) as monitor:
            return await question(monitor)
    except MonitorLostError:
        async with _bare_qemu(host, machine, accel) as monitor:
            return await question(monitor)


@asynccontextmanager
async def _bare_qemu(host: Host, machine: str, accel: str) -> AsyncIterator[Monitor]:
    """A QEMU without a guest for the block; nothing of it remains."""
    directory = host.state_dir / "cache" / f"probe-{os.urandom(4).hex()}"
    await host.make_dir(directory)
    socket_path, stderr = directory / "qmp.sock", directory / "stderr.log"
    argv = [
        host.qemu,
        "-machine",
        machine,
        "-accel",
        accel,
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-S",
        "-qmp",
        f"unix:{socket_path},server=on,wait=off",
    ]
    try:
        process, monitor = await greeted(host, argv, socket_path, stderr)
        try:
            yield monitor
        except MonitorLostError as exc:
            words = await last_lines(host, stderr)
            raise MonitorLostError(
                f"QEMU on {host.name} did not answer",
                why=f"{exc.why}; it said: {words}" if words else exc.why,
                remedy=exc.remedy,
            ) from exc
        finally:
            try:
                await monitor.close()
            finally:
                await asyncio.shield(host.kill(process))
    finally:
        await host.remove(directory)
