"""What the lab's tests share."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from vmckpt.lab import lab as labs
from vmckpt.lab.processes import find, tool
from vmckpt.lab.state import Lab, lab_directory

REPOSITORY = Path(__file__).resolve().parents[2]
# Stands for QEMU where none runs: any program will do.
PROGRAM = Path(tool("sleep"))


@contextmanager
def a_state_dir() -> Iterator[Path]:
    """A directory for a lab, with a short path as unix sockets need it, where any user may be."""
    path = Path(tempfile.mkdtemp(prefix="vk-", dir="/tmp"))
    yield path
    asyncio.run(labs.down(path))
    shutil.rmtree(path)


@asynccontextmanager
async def a_lab(state_dir: Path, hosts: int = 2) -> AsyncIterator[Lab]:
    lab = await labs.up(state_dir, hosts=hosts, qemus=[PROGRAM])
    try:
        yield lab
    finally:
        await labs.down(state_dir)


def left(state_dir: Path) -> list[str]:
    """What is left of a lab; the inventory's folder stays."""
    files = [str(path) for path in state_dir.rglob("*") if path != state_dir / "hosts"]
    return files + [str(process) for process in find(lab_directory(state_dir))]
