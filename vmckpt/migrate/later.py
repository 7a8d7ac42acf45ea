"""Import what a migration needs from its transfer on, so that no earlier step waits for it."""

from collections.abc import Iterable
from importlib import import_module

_TO_SEND = ("vmckpt.migrate.steps.listen", "vmckpt.migrate.steps.transfer")
_TO_ARRIVE = (
    "concurrent.futures.thread",  # for files that are slow to remove
    "shutil",
    "vmckpt.hosts.sockets.guest_silence",
    "vmckpt.migrate.steps.arrival",
    "vmckpt.migrate.steps.handover",
    "vmckpt.migrate.outcome.recover",
    "vmckpt.migrate.report",
)


def load_to_send() -> None:
    """While the destination's QEMU starts, which takes longer."""
    _load(_TO_SEND)


def load_to_arrive() -> None:
    """While memory is sent, and the migration can still be undone if an import fails."""
    _load(_TO_ARRIVE)


def _load(names: Iterable[str]) -> None:
    for name in names:
        import_module(name)
