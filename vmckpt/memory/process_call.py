"""One system call made by another process on our behalf (x86-64 Linux, ptrace(2)).

The main thread is stopped for some 0.2 ms. No code of it is overwritten, which another of its
threads could run into: it is pointed at the `syscall` instruction of its vDSO, stepped over that,
and put back where it was, an interrupted call included.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

STOP_TIMEOUT_S = 2.0
_POLL_S = 0.0001
_WALL = 0x40000000  # __WALL: threads too
_GETREGS, _SETREGS, _DETACH, _SINGLESTEP = 12, 13, 17, 9
_SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4206, 0x4207, 0x420A, 0x420B
_SIGSET_BYTES = 8
# SIGTRAP ends the step; everything else waits until the thread is back where it was.
_ONLY_SIGTRAP = ~(1 << (signal.SIGTRAP - 1)) & (1 << 64) - 1
_SYSCALL = b"\x0f\x05"
_NO_RESTART = (1 << 64) - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


_REGISTERS = (
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss "
    "fs_base gs_base ds es fs gs"
)


class _Registers(ctypes.Structure):
    """struct user_regs_struct of x86-64."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in _REGISTERS.split()]


Call = Callable[..., int]


def with_calls_in(pid: int, work: Callable[[Call], T]) -> T:
    """`work(call)`, where `call(number, *arguments)` makes a system call in process `pid`.

    The process stands still meanwhile; do little. Raises OSError: not allowed (EPERM), gone
    (ESRCH), stopped by a signal or not to be stopped (EBUSY), or what the call itself came to.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def trace() -> None:
        try:
            with _stopped(pid) as call:
                done.append(work(call))
        except BaseException as exc:  # noqa: BLE001 - raised again below, in the caller's thread
            failed.append(exc)

    # A tracer is one thread, and no signal handler runs in this one. When it ends, however it does,
    # the kernel lets the process go.
    thread = threading.Thread(target=trace)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


@contextmanager
def _stopped(pid: int) -> Iterator[Call]:
    _ptrace(_SEIZE, pid)
    _ptrace(_INTERRUPT, pid)
    if _wait(pid) != signal.SIGTRAP:
        _ptrace(_DETACH, pid)
        raise OSError(16, "a signal has stopped the process")
    saved, mask = _Registers(), ctypes.c_uint64()
    _ptrace(_GETREGS, pid, data=ctypes.addressof(saved))
    _ptrace(_GETSIGMASK, pid, _SIGSET_BYTES, ctypes.addressof(mask))
    try:
        gate = _syscall_instruction(pid)
        blocked = ctypes.c_uint64(_ONLY_SIGTRAP)
        _ptrace(_SETSIGMASK, pid, _SIGSET_BYTES, ctypes.addressof(blocked))
        yield lambda number, *arguments: _call(pid, saved, gate, number, arguments)
    finally:
        _ptrace(_SETREGS, pid, data=ctypes.addressof(saved))
        _ptrace(_SETSIGMASK, pid, _SIGSET_BYTES, ctypes.addressof(mask))
        _ptrace(_DETACH, pid)


def _call(pid: int, saved: _Registers, gate: int, number: int, arguments: tuple[int, ...]) -> int:
    registers = _Registers.from_buffer_copy(saved)
    registers.rip, registers.rax, registers.orig_rax = gate, number, _NO_RESTART
    for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False):
        setattr(registers, name, value)
    _ptrace(_SETREGS, pid, data=ctypes.addressof(registers))
    _ptrace(_SINGLESTEP, pid)
    if (stopped_by := _wait(pid)) != signal.SIGTRAP:
        raise OSError(16, f"the process was stopped by signal {stopped_by}")
    _ptrace(_GETREGS, pid, data=ctypes.addressof(registers))
    result = ctypes.c_longlong(registers.rax).value
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def _syscall_instruction(pid: int) -> int:
    """The address of a `syscall` instruction in the process's vDSO."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("[vdso]"):
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
                memory.seek(start)
                found = memory.read(end - start).find(_SYSCALL)
            if found >= 0:
                return start + found
    raise OSError(38, "the process has no vDSO with a syscall instruction")


def _wait(pid: int) -> int:
    """The signal that the process now stands at. Raises OSError when it ends or does not stop."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while True:
        found, status = os.waitpid(pid, _WALL | os.WNOHANG)
        if found and os.WIFSTOPPED(status):
            return os.WSTOPSIG(status)
        if found:
            raise ProcessLookupError(3, "the process has ended")
        if time.monotonic() > deadline:
            raise OSError(16, f"the process did not stop within {STOP_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, pid, address or None, data or None) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace: {os.strerror(error)}")
