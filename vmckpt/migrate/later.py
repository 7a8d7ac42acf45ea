"""What a migration needs from its transfer on: nothing before that should wait for loading it."""

from importlib import import_module

_NEEDED = (
    "concurrent.futures.thread",  # for files that take long to remove
    "shutil",
    "vmckpt.hosts.hearing",
    "vmckpt.migrate.arrival",
    "vmckpt.migrate.drain",
    "vmckpt.migrate.handover",
    "vmckpt.migrate.listen",
    "vmckpt.migrate.recover",
    "vmckpt.migrate.report",
    "vmckpt.migrate.settle",
    "vmckpt.migrate.transfer",
)


def load() -> None:
    """Load it now, where there is nothing else to do for some milliseconds."""
    for name in _NEEDED:
        import_module(name)
