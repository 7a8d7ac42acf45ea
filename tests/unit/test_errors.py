"""Errors: the class decides the exit code, the text says what, why and what to do."""

import inspect

from vmckpt import errors
from vmckpt.cli.main import EXIT_CODES
from vmckpt.errors import BusyError, OperationFailedError, TimedOutError, VmckptError
from vmckpt.qemu.monitor import CommandRefusedError, MonitorLostError

CLASSES = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, VmckptError)
]

# Scripts rely on these.
STABLE = {
    "VmckptError": (1, "failed"),
    "UsageError": (2, "usage"),
    "NotFoundError": (3, "not-found"),
    "RefusedError": (4, "refused"),
    "BusyError": (5, "busy"),
    "HostDownError": (6, "unreachable"),
    "OperationFailedError": (7, "undone"),
    "TimedOutError": (8, "timed-out"),
    "OutcomeUnknownError": (9, "unknown"),
    "VmLostError": (10, "lost"),
    "StorageError": (11, "storage"),
    "JobHeldError": (1, "job-held"),
    "CancelledByUserError": (130, "cancelled"),
}


def test_exit_codes_and_kinds_are_stable() -> None:
    assert {kind.__name__: (kind.exit_code, kind.kind) for kind in CLASSES} == STABLE


def test_every_exit_code_is_in_the_help() -> None:
    documented = " ".join(EXIT_CODES.split())
    for kind in CLASSES:
        assert f" {kind.exit_code} " in documented


def test_an_error_says_what_why_and_what_to_do() -> None:
    error = BusyError("'web' is busy", why="held by a snapshot", remedy="wait")
    assert str(error) == "'web' is busy: held by a snapshot (wait)"
    assert (error.what, error.why, error.remedy) == ("'web' is busy", "held by a snapshot", "wait")


def test_a_lost_monitor_counts_as_unreachable_and_a_refusal_as_undone() -> None:
    assert MonitorLostError.exit_code == 6
    assert CommandRefusedError.exit_code == 7
    assert issubclass(TimedOutError, OperationFailedError)
    refused = CommandRefusedError("web on a", "cont", "Resetting the VM is required")
    assert refused.what == "web on a refused cont"
    assert refused.why == refused.description == "Resetting the VM is required"
