"""Memory that cannot be read is said to be that, not a file of the operator's."""

import asyncio
import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.checkpoint.take import Taking
from vmckpt.errors import OperationFailedError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("code", "why"),
    [(errno.ESRCH, "its QEMU has ended"), (errno.EPERM, "Operation not permitted")],
)
def test_a_checkpoint_says_why_memory_cannot_be_read(code: int, why: str) -> None:
    async def calls(_: object) -> None:
        raise OSError(code, os.strerror(code))

    vm: Any = SimpleNamespace(
        name="web", spec=SimpleNamespace(memory_bytes=0), qemu=SimpleNamespace(files=None)
    )
    made: Any = SimpleNamespace()
    store: Any = calls
    one: Any = Taking(vm, made, made, store, print)
    with pytest.raises(OperationFailedError, match="the memory of 'web'") as failed:
        asyncio.run(one._moment(SimpleNamespace(area=print)))
    assert failed.value.why == why
