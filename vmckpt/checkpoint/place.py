"""Where checkpoints are kept: a host's own store, or the one that the operator names."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from vmckpt.errors import NotFoundError, RefusedError
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.store.open import create_store, open_store
from vmckpt.store.store import Checkpoint, Store


def own_place(state_dir: Path) -> str:
    """Where a host keeps checkpoints unless told otherwise."""
    return str(state_dir / "checkpoints")


@asynccontextmanager
async def reading(place: str, checkpoint_id: str) -> AsyncIterator[Checkpoint]:
    """A checkpoint to read from for the block, in which it is not removed. Raises as both do."""
    store = await in_thread(partial(open_store, place))
    opened = store.read(checkpoint_id)
    try:
        point = await in_thread(opened.__enter__)
        try:
            yield point
        finally:
            await finish(in_thread(partial(opened.__exit__, None, None, None)))
    finally:
        store.close()


def open_or_create(place: str) -> Store:
    """The store at `place`, made when there is none. Blocking. Raises as both do."""
    try:
        return open_store(place)
    except NotFoundError:
        try:
            return create_store(place)
        except RefusedError:  # somebody else has made it meanwhile
            return open_store(place)
