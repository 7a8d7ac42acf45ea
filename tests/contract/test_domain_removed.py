"""What stays of a domain that is removed: its files, and what its TPM holds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains import lifecycle
from vmckpt.vm.domains.flags import Undefine
from vmckpt.vm.domains.libvirtd import Libvirtd

pytestmark = pytest.mark.contract


class Told:
    """libvirt's own objects: what is asked of a domain."""

    def __init__(self) -> None:
        self.flags = list[int]()

    def lookupByUUIDString(self, uuid: str) -> "Told":  # noqa: N802
        return self

    def undefineFlags(self, flags: int) -> None:  # noqa: N802
        self.flags.append(flags)


@pytest.mark.parametrize(
    ("has_tpm", "with_tpm", "flag", "stays"),
    [
        (False, False, Undefine(0), None),
        (False, True, Undefine(0), None),
        (True, False, Undefine.KEEP_TPM, "/var/lib/libvirt/swtpm/u"),
        (True, True, Undefine.TPM, None),
    ],
)
def test_what_a_tpm_holds_stays_unless_it_is_to_go(
    monkeypatch: pytest.MonkeyPatch,
    flag: Undefine,
    stays: str | None,
    *,
    has_tpm: bool,
    with_tpm: bool,
) -> None:
    """Libvirt removes it by itself; disks that the guest encrypted by it would be lost."""
    told, session = Told(), Libvirtd("test:///default", LocalHost("a", Path("/"), "::1"))
    session._connection = told
    description = SimpleNamespace(has_tpm=has_tpm)
    domain: Any = SimpleNamespace(name="web", uuid="u", is_active=False, description=description)

    @asynccontextmanager
    async def held(*_: object) -> AsyncIterator[tuple[Any, Libvirtd]]:
        yield domain, session

    monkeypatch.setattr(lifecycle, "held_domain", held)
    assert asyncio.run(lifecycle.remove_domain(domain, with_tpm=with_tpm)) == stays
    assert told.flags == [Undefine.SNAPSHOTS_METADATA | Undefine.KEEP_NVRAM | flag]
