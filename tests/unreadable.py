"""A directory that cannot be read just now."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest


@contextmanager
def nothing_is_listed() -> Iterator[None]:
    """For the block no directory can be listed, as by a failing disk or without the right to.

    The error is one that `Path.glob` takes for an empty directory in every version of Python.
    """

    def refused(path: object = ".", *_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", refused)
        patch.setattr(os, "listdir", refused)
        yield
