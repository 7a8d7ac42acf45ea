"""What can go wrong: the class decides the exit code, the text says what, why and what to do."""

from typing import ClassVar


class VmckptError(Exception):
    """Says what failed, why, and what the operator can do next."""

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "failed"

    def __init__(self, what: str, *, why: str, remedy: str) -> None:
        super().__init__(what)
        self.what, self.why, self.remedy = what, why, remedy

    def __str__(self) -> str:
        return f"{self.what}: {self.why} ({self.remedy})"


class UsageError(VmckptError):
    """The request itself is wrong: a bad name, a malformed spec, conflicting options."""

    exit_code = 2
    kind = "usage"


class NotFoundError(VmckptError):
    """No such VM, host, snapshot or run."""

    exit_code = 3
    kind = "not-found"


class RefusedError(VmckptError):
    """A preflight check failed; nothing was changed."""

    exit_code = 4
    kind = "refused"


class BusyError(VmckptError):
    """Another operation holds the VM."""

    exit_code = 5
    kind = "busy"


class HostDownError(VmckptError):
    """A host, or a QEMU's monitor on it, cannot be reached."""

    exit_code = 6
    kind = "unreachable"


class OperationFailedError(VmckptError):
    """The operation was started, failed, and was undone: the VM is where it was before."""

    exit_code = 7
    kind = "undone"


class TimedOutError(OperationFailedError):
    """The operation did not complete in time and was undone."""

    exit_code = 8
    kind = "timed-out"


class OutcomeUnknownError(VmckptError):
    """It is unknown whether the command took effect.

    Never treat it as a failure and never retry blindly: ask both hosts.
    """

    exit_code = 9
    kind = "unknown"


class VmLostError(VmckptError):
    """The VM runs nowhere and cannot continue from memory."""

    exit_code = 10
    kind = "lost"


class StorageError(VmckptError):
    """A file could not be written or read: the disk is full, or permissions are missing."""

    exit_code = 11
    kind = "storage"


class CancelledByUserError(VmckptError):
    """Ctrl-C: the operation was undone; the VM is where it was."""

    exit_code = 130
    kind = "cancelled"


class JobHeldError(VmckptError):
    """The VM is where it was supposed to be, but jobs that used its device were not resumed."""

    exit_code = 1
    kind = "job-held"
