"""What a migration needs from its transfer on: nothing before that should wait for loading it."""

import asyncio
from importlib import import_module

_TO_SEND = ("vmckpt.migrate.listen", "vmckpt.migrate.transfer")
_TO_ARRIVE = (
    "concurrent.futures.thread",  # for files that take long to remove
    "shutil",
    "vmckpt.hosts.hearing",
    "vmckpt.migrate.arrival",
    "vmckpt.migrate.handover",
    "vmckpt.migrate.recover",
    "vmckpt.migrate.report",
)


def load_to_send() -> None:
    """While the target's QEMU starts, which takes longer."""
    for name in _TO_SEND:
        import_module(name)


async def load_to_arrive() -> None:
    """While memory goes over, which as a rule takes longer: by pieces of some milliseconds."""
    for name in _TO_ARRIVE:
        import_module(name)
        await asyncio.sleep(0)
