"""Fixtures for tests on hosts that look like machines."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kinds import require_root
from tests.qemu.world import qemu, show_evidence
from tests.real.domains import OWN_DISK, remove_domain, run_domain, secure
from tests.real.machines import LOGS, VM_LOGS, Machines, machines


@pytest.fixture(autouse=True, scope="session")
def _root() -> None:
    require_root()


class Kept:
    """One lab for many tests; made again after a test that left something in it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: Machines | None = None

    def get(self) -> Machines:
        if self._made is None:
            self._made = self._stack.enter_context(machines([qemu("10.0")] * 2))
        return self._made

    def drop(self) -> None:
        self._made = None
        self._stack.close()


@pytest.fixture(scope="session")
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.drop()


@pytest.fixture
def real_lab(kept: Kept) -> Iterator[Machines]:
    """Hosts lab-a and lab-b with QEMU 10.0, sshd and libvirtd, and nothing on them.

    What a test leaves on them is removed, and what they said is shown when it fails. Cables that a
    test pulls it plugs in again.
    """
    made = kept.get()
    yield made
    show_evidence(made.state_dir, *LOGS, VM_LOGS)
    if not made.is_fresh():
        kept.drop()


@pytest.fixture
def bare_hosts() -> Iterator[Machines]:
    """One host, lab-a, with Debian and sshd and nothing else; its own lab."""
    with machines([qemu("10.0")], bare=True) as made:
        yield made


@pytest.fixture(scope="module")
def secured() -> Iterator[Machines]:
    """Hosts of this module's own, whose libvirtds take orders by TLS."""
    with machines([qemu("10.0")] * 2) as made:
        secure(made)
        yield made


@pytest.fixture
def domain(secured: Machines) -> Iterator[Machines]:
    """A domain on lab-a with a disk on shared storage."""
    try:
        run_domain(secured, "lab-a", disk=secured.shared / "dom.qcow2")
        yield secured
    finally:
        remove_domain(secured)


@pytest.fixture
def own_disk(secured: Machines) -> Iterator[Machines]:
    """A domain on lab-a with a disk of that host's own."""
    try:
        run_domain(secured, "lab-a", disk=OWN_DISK)
        yield secured
    finally:
        remove_domain(secured)
