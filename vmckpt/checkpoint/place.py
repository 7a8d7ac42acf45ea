"""Where checkpoints are kept: a host's own store, or the one that the operator names."""

from pathlib import Path

from vmckpt.errors import NotFoundError, RefusedError
from vmckpt.store.open import create_store, open_store
from vmckpt.store.store import Store


def own_place(state_dir: Path) -> str:
    """Where a host keeps checkpoints unless told otherwise."""
    return str(state_dir / "checkpoints")


def open_or_create(place: str) -> Store:
    """The store at `place`, made when there is none. Blocking. Raises as both do."""
    try:
        return open_store(place)
    except NotFoundError:
        try:
            return create_store(place)
        except RefusedError:  # somebody else has made it meanwhile
            return open_store(place)
