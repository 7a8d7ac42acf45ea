"""A program that has another process make a system call, and takes its descriptor (x86-64, ptrace).

    python -I -S process_call.py PID NUMBER ARGUMENT... <socket

Process PID makes system call NUMBER, which returns a descriptor; this program takes that over,
closes it there, and sends it through the socket: b"0 " and the descriptor, or b"ERRNO why". See
`memory/borrowed.py`, which starts it. (`call_there` is for a program that is as careful as
this one, `checkpoint/restore/pager.py`: the process keeps what it has made.)

It overwrites no code of PID, which another of its threads could execute: its main thread is
pointed at the `syscall` instruction of its vDSO, stepped over that, twice, and put back where it
was, an interrupted call included. If the tracer died, the thread would continue from there. So
nothing that ends the caller reaches this program: it has its own session, blocks all signals, and
from before it attaches until it has detached it neither reads from nor writes to other processes.

What remains: a SIGKILL for this very process (kill -9 by its pid, the whole cgroup killed, out of
memory) between the first change of the registers and the last. Measured 200 times on a QEMU 10.0
(TCG, a writing guest; as root, two cores, load 2 to 3): that is 153 us in the median, 55 at best,
3.5 ms at worst; the main thread is stopped for 278 us, 118 at best, 4.8 ms at worst.
"""

import ctypes
import errno
import gc
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

STOP_TIMEOUT_S = 2.0
_WALL = 0x40000000  # __WALL: threads too
_GETREGS, _SETREGS, _CONT, _DETACH, _SINGLESTEP = 12, 13, 7, 17, 9
_SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4206, 0x4207, 0x420A, 0x420B
_SECCOMP_GET_FILTER = 0x420C
_EVENT_STOP = 128
_SIGSET_BYTES = 8
# SIGTRAP ends the step; everything else waits until the thread is back where it was.
_ONLY_SIGTRAP = ctypes.c_uint64(~(1 << (signal.SIGTRAP - 1)) & (1 << 64) - 1)
# More than execve(2) accepts: a process can make its own appear longer.
_MOST_WORDS_BYTES = 8 << 20
_SYSCALL = b"\x0f\x05"
_NO_RESTART = (1 << 64) - 1
_NR_OPEN, _NR_CLOSE, _NR_MMAP, _NR_IOCTL = 2, 3, 9, 16
_NR_USERFAULTFD, _NR_PIDFD_GETFD = 323, 438
NR_MADVISE = 28
_NAMES = {
    _NR_OPEN: "open", _NR_MMAP: "mmap", _NR_IOCTL: "ioctl", _NR_USERFAULTFD: "userfaultfd",
    NR_MADVISE: "madvise",
}  # fmt: skip
# struct seccomp_data, its architecture (x86-64), and what a filter returns for an allowed call.
_SECCOMP_DATA, _ARCH_X86_64, _ALLOW = struct.Struct("<iI7Q"), 0xC000003E, 0x7FFF0000
_INSTRUCTION = struct.Struct("<HBBI")  # struct sock_filter
_MOST_FILTERS = 64
# linux/userfaultfd.h: same as the call, subject to the device's permissions (Linux 6.1).
_DEVICE, _USERFAULTFD_NEW = b"/dev/userfaultfd\0", 0xAA00
# Below the stack and its red zone of 128 bytes: nothing is stored there.
_BELOW_STACK, _MOST_PATH_BYTES = 1024, 800
_READ_WRITE = 3  # PROT_READ | PROT_WRITE
_NOT_ITS_USER = "its user may not use userfaultfd; as root: sysctl -w vm.unprivileged_userfaultfd=1"
_PRIVATE_HERE = 0x4012  # MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE
_SHARED_HERE = 0x4011  # MAP_SHARED | MAP_FIXED | MAP_NORESERVE

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


def main() -> None:
    """Do what the arguments say, answer, end."""
    be_undisturbed()
    # If allowed: on a busy machine the other process then waits less long for us.
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    pid, number, *arguments = (int(word) for word in sys.argv[1:])
    with socket.socket(fileno=0) as asker:
        try:
            taken = [_take(pid, number, arguments)]
            answer = b"0 "
        except OSError as exc:
            taken = []
            answer = f"{exc.errno} {exc.strerror}".encode()
        try:
            socket.send_fds(asker, [answer], taken, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError):
            return  # the caller has died; the descriptor goes with this process


def _take(pid: int, number: int, arguments: list[int]) -> int:
    """Our copy of the descriptor that the call created there."""
    _require_unconfined(pid)
    gate, pidfd = _syscall_instruction(pid), os.pidfd_open(pid)
    with _stopped(pid) as saved:
        _require_allowed(pid, number, _NR_CLOSE)
        there = _made(pid, saved, gate, number, arguments)
        ours = _libc.syscall(_NR_PIDFD_GETFD, pidfd, there, 0)
        error = ctypes.get_errno()
        _call(pid, saved, gate, _NR_CLOSE, [there])
    if ours < 0:
        raise OSError(error, f"pidfd_getfd: {os.strerror(error)}")
    return int(ours)


def be_undisturbed() -> None:
    """Block all signals from here on, as `main` does first; for programs that do the same."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # reports a stop of the process
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    gc.disable()


def call_there(pid: int, number: int, *arguments: int) -> int:
    """What the call returns in `pid`: the number of a descriptor, say, which `pid` keeps.

    Raises OSError. Only for a process in its own session that is `be_undisturbed` and has one
    thread.
    """
    _require_unconfined(pid)
    gate = _syscall_instruction(pid)
    with _stopped(pid) as saved:
        _require_allowed(pid, number)
        return _made(pid, saved, gate, number, list(arguments))


def map_there(
    pid: int,
    path: Path,
    spans: Sequence[tuple[int, int]],
    advice: Sequence[int],
    *,
    shared: bool = False,
) -> None:
    """Replace the memory of `pid` at these addresses with mappings of a file: private or `shared`.

    The spans have the file's content one after the other. `advice`: madvise(2) values to apply to
    the mappings. Conditions as for `call_there`. Raises OSError: of the first span, unless madvise
    failed, nothing was changed; others may have the file's content.
    """
    words = os.fsencode(path) + b"\0"
    if len(words) > _MOST_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path))
    _require_unconfined(pid)
    gate = _syscall_instruction(pid)
    with _stopped(pid) as saved:
        _require_allowed(pid, _NR_OPEN, _NR_MMAP, NR_MADVISE, _NR_CLOSE)
        at = _stored(pid, saved, words)
        how = (os.O_RDWR if shared else os.O_RDONLY) | os.O_CLOEXEC
        file = _call(pid, saved, gate, _NR_OPEN, [at, how])
        try:
            kind, offset = _SHARED_HERE if shared else _PRIVATE_HERE, 0
            for start, end in spans:
                where = [start, end - start, _READ_WRITE, kind, file, offset]
                _call(pid, saved, gate, _NR_MMAP, where)
                offset += end - start
                for one in advice:
                    _call(pid, saved, gate, NR_MADVISE, [start, end - start, one])
        finally:
            _call(pid, saved, gate, _NR_CLOSE, [file])


def _stored(pid: int, saved: _Registers, words: bytes) -> int:
    """The address in `pid` where the words are now."""
    at = saved.rsp - _BELOW_STACK
    with Path(f"/proc/{pid}/mem").open("r+b", 0) as memory:
        memory.seek(at)
        memory.write(words)
    return int(at)


def descriptor_of(pid: int, number: int) -> int:
    """Our copy of a descriptor that process `pid` has. Raises OSError."""
    pidfd = os.pidfd_open(pid)
    try:
        ours = _libc.syscall(_NR_PIDFD_GETFD, pidfd, number, 0)
        if ours < 0:
            raise OSError(error := ctypes.get_errno(), f"pidfd_getfd: {os.strerror(error)}")
    finally:
        os.close(pidfd)
    return int(ours)


@contextmanager
def _stopped(pid: int) -> Iterator[_Registers]:
    """Stop the process's main thread for the block, with its registers preserved."""
    saved, mask = _Registers(), ctypes.c_uint64()
    _ptrace(_SEIZE, pid)
    _ptrace(_INTERRUPT, pid)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while (stop := _wait(pid, deadline_s)).event != _EVENT_STOP:
        _ptrace(_CONT, pid, data=stop.signal)  # a signal came first: deliver it
    if stop.signal != signal.SIGTRAP:
        _ptrace(_DETACH, pid)
        raise OSError(errno.EBUSY, "a signal has stopped the process")
    _ptrace(_GETREGS, pid, data=ctypes.addressof(saved))
    _ptrace(_GETSIGMASK, pid, _SIGSET_BYTES, ctypes.addressof(mask))
    try:
        _ptrace(_SETSIGMASK, pid, _SIGSET_BYTES, ctypes.addressof(_ONLY_SIGTRAP))
        yield saved
    finally:
        _ptrace(_SETREGS, pid, data=ctypes.addressof(saved))
        _ptrace(_SETSIGMASK, pid, _SIGSET_BYTES, ctypes.addressof(mask))
        _ptrace(_DETACH, pid)


def _made(pid: int, saved: _Registers, gate: int, number: int, arguments: list[int]) -> int:
    """The result of the call there. If the kernel refuses a userfaultfd, /dev/userfaultfd creates
    it: the process's group may have access to that.
    """
    try:
        return _call(pid, saved, gate, number, arguments)
    except PermissionError as refused:
        if number != _NR_USERFAULTFD:
            raise
        _require_allowed(pid, _NR_OPEN, _NR_IOCTL, _NR_CLOSE)
        at = _stored(pid, saved, _DEVICE)
        try:
            device = _call(pid, saved, gate, _NR_OPEN, [at, os.O_RDWR | os.O_CLOEXEC])
        except OSError:
            raise PermissionError(refused.errno, _NOT_ITS_USER) from None
    try:
        return _call(pid, saved, gate, _NR_IOCTL, [device, _USERFAULTFD_NEW, *arguments])
    finally:
        _call(pid, saved, gate, _NR_CLOSE, [device])


def _call(pid: int, saved: _Registers, gate: int, number: int, arguments: list[int]) -> int:
    registers = _Registers.from_buffer_copy(saved)
    registers.rip, registers.rax, registers.orig_rax = gate, number, _NO_RESTART
    for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False):
        setattr(registers, name, value)
    _ptrace(_SETREGS, pid, data=ctypes.addressof(registers))
    _ptrace(_SINGLESTEP, pid)
    # However long it takes: detaching now would let it run from there. A SIGSTOP is passed on, and
    # stops the process when we have detached.
    while (stop := _wait(pid)) != (signal.SIGTRAP, 0):
        _ptrace(_SINGLESTEP, pid, data=0 if stop.event else stop.signal)
    _ptrace(_GETREGS, pid, data=ctypes.addressof(registers))
    result = ctypes.c_longlong(registers.rax).value
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def _require_unconfined(pid: int) -> None:
    """Raises unless it has no seccomp filter, which might kill it for the call, or only QEMU's
    sandbox.

    That one denies by name (system/qemu-seccomp.c), and neither userfaultfd nor close;
    `_require_allowed` sees for itself.
    """
    # In its name, which may be any bytes, newlines are escaped: no line comes from the name.
    status = Path(f"/proc/{pid}/status").read_bytes()
    if b"\nSeccomp:\t0\n" in status:
        return
    with Path(f"/proc/{pid}/cmdline").open("rb") as file:
        words = file.read(_MOST_WORDS_BYTES).split(b"\0")
    own = any(one == b"-sandbox" and two.startswith(b"on") for one, two in pairwise(words))
    if not own or b"\nSeccomp_filters:\t1\n" not in status:
        raise OSError(errno.EOPNOTSUPP, "the process is confined by seccomp")


def _require_allowed(pid: int, *numbers: int) -> None:
    """Raises unless the seccomp filters of the stopped process let it make these system calls.

    They are read and evaluated. Who may not read them (that takes CAP_SYS_ADMIN, and a kernel with
    checkpoint/restore) goes by `_require_unconfined` alone.
    """
    try:
        programs = _filters(pid)
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EINVAL, errno.EIO):
            return
        raise
    denied = [n for n in numbers if any(verdict(one, n) != _ALLOW for one in programs)]
    if denied:
        names = ", ".join(_NAMES.get(number, str(number)) for number in denied)
        raise OSError(errno.EOPNOTSUPP, f"its seccomp filter does not allow {names}")


def _filters(pid: int) -> list[bytes]:
    """The programs of a stopped process's seccomp filters. Raises OSError."""
    found = list[bytes]()
    while len(found) < _MOST_FILTERS:
        try:
            count = _ptrace(_SECCOMP_GET_FILTER, pid, len(found))
        except FileNotFoundError:  # there are no more
            return found
        program = ctypes.create_string_buffer(_INSTRUCTION.size * count)
        _ptrace(_SECCOMP_GET_FILTER, pid, len(found), ctypes.addressof(program))
        found.append(program.raw)
    raise OSError(errno.EOPNOTSUPP, f"it has more than {_MOST_FILTERS} seccomp filters")


def verdict(program: bytes, number: int) -> int:
    """What a seccomp filter returns for system call `number` of x86-64, its arguments all 0. Pure.

    Raises OSError (EOPNOTSUPP) for an instruction that filters of QEMU and libseccomp do not have.
    """
    instructions = list(_INSTRUCTION.iter_unpack(program))
    data = _SECCOMP_DATA.pack(number, _ARCH_X86_64, *[0] * 7)
    value, at, memory = 0, 0, [0] * 16
    while at < len(instructions):  # jumps lead ahead only
        code, if_true, if_false, k = instructions[at]
        at += 1
        match code:
            case 0x20 if k <= len(data) - 4:  # ld [k]
                (value,) = struct.unpack_from("<I", data, k)
            case 0x60 if k < len(memory):  # ld M[k]
                value = memory[k]
            case 0x02 if k < len(memory):  # st M[k]
                memory[k] = value
            case 0x54:  # and
                value &= k
            case 0x05:  # ja
                at += k
            case 0x15 | 0x25 | 0x35 | 0x45:  # jeq, jgt, jge, jset
                holds = {0x15: value == k, 0x25: value > k, 0x35: value >= k, 0x45: value & k}
                at += if_true if holds[code] else if_false
            case 0x06:  # ret
                return int(k)
            case _:
                raise OSError(errno.EOPNOTSUPP, f"its seccomp filter has an unknown {code:#x}")
    raise OSError(errno.EOPNOTSUPP, "its seccomp filter has no end")


def _syscall_instruction(pid: int) -> int:
    """The address of a `syscall` instruction in the process's vDSO."""
    for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n"):
        if line.split(maxsplit=5)[5:] == [b"[vdso]"]:
            start, end = (int(part, 16) for part in line.split()[0].split(b"-"))
            with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
                memory.seek(start)
                found = memory.read(end - start).find(_SYSCALL)
            if found >= 0:
                return start + found
    raise OSError(errno.ENOSYS, "the process has no vDSO with a syscall instruction")


class _Stop(NamedTuple):
    """The reason for a stop."""

    signal: int
    event: int  # of ptrace(2), or 0


def _wait(pid: int, deadline_s: float | None = None) -> _Stop:
    """The next stop of the process. Raises OSError when it ends, or does not stop in time."""
    while True:
        found, status = os.waitpid(pid, _WALL | os.WNOHANG)
        if found and os.WIFSTOPPED(status):
            return _Stop(os.WSTOPSIG(status), status >> 16)
        if found:
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
        if deadline_s is None:
            signal.sigwaitinfo({signal.SIGCHLD})
        elif signal.sigtimedwait({signal.SIGCHLD}, max(0, deadline_s - time.monotonic())) is None:
            raise OSError(errno.EBUSY, f"the process did not stop within {STOP_TIMEOUT_S:g} s")


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    result = _libc.ptrace(request, pid, address or None, data or None)
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace: {os.strerror(error)}")
    return int(result)


if __name__ == "__main__":
    main()
