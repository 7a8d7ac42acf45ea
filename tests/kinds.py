"""Hosts for tests that run on every kind of them: the lab's plain ones, and those like machines."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import pytest

from tests.qemu.world import World, spoilable, world
from tests.real.machines import machines


class Kind(StrEnum):
    """What the hosts are, and how vmckpt reaches them."""

    LAB = "lab"  # networks of this machine, reached as local hosts
    REAL = "real"  # they look like machines, and are reached over SSH


# Of QEMU, for what takes long and differs little between them.
VERSIONS = ("10.0", pytest.param("7.2", marks=pytest.mark.long))
EVERY_KIND = (Kind.LAB, pytest.param(Kind.REAL, marks=pytest.mark.real))


@contextmanager
def hosts(kind: Kind, *qemus: Path) -> Iterator[World]:
    """Hosts lab-a, lab-b, ..., the i-th with the i-th QEMU; nothing of them stays."""
    if kind is Kind.LAB:
        with world(*qemus) as made:
            yield made
    else:
        require_root()
        with machines(qemus) as made:
            made.certify()  # between two machines nothing goes unencrypted
            yield made


@contextmanager
def spoilable_hosts(kind: Kind, directory: Path) -> Iterator[World]:
    """Two of them whose QEMUs' monitors obey `World.spoilt`; `directory` is for these QEMUs."""
    wrapper = spoilable("10.0", directory)
    with hosts(kind, wrapper, wrapper) as made:
        yield made


def require_root() -> None:
    """Skip the test unless hosts that look like machines can be made."""
    if os.geteuid() != 0:
        pytest.skip("hosts that look like machines take root")
