"""What a fork begins from: a checkpoint that is there, or one taken now of a running VM."""

from typing import TYPE_CHECKING

from vmckpt.cli.output import run

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue import Entry
    from vmckpt.store.sealing.keys import KeySource


def instant(what: str, store: str | None, key: "KeySource | None") -> "Entry":
    """The checkpoint of that name or id, else a new one of the VM of that name.

    Raises NotFoundError when there is neither.
    """
    import time

    from vmckpt.checkpoint.operate import create
    from vmckpt.checkpoint.take import Wish
    from vmckpt.cli.found import find_own
    from vmckpt.cli.which_checkpoint import find
    from vmckpt.errors import NotFoundError

    try:
        return find(what, store, key)
    except NotFoundError as no_checkpoint:
        try:
            vm = run(find_own(what))
        except NotFoundError:
            raise no_checkpoint from None
    name = f"{what[:18]}-fork-{time.strftime('%Y%m%d-%H%M%S')}"
    wish = Wish(name, {}, "fork", 0.010, if_taken="number")
    taken = run(create(vm, store, wish, lambda _: None, key))
    return find(taken["id"], store, key)
