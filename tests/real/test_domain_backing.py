"""Domains whose memory is in files or huge pages, or gets more while the guest runs."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.real.domains import GUEST, start_libvirtd, stop_libvirtd
from tests.real.machines import Machines
from tests.real.test_domain_blocks import (
    BLOCKS,
    MODULE,
    MODULE_MIB,
    in_blocks,
    is_as_before,
    loaded,
    removed,
)
from tests.real.test_domain_checkpoints import COPY, booted, take, xml
from tests.real.test_domain_forks import FORKS
from tests.real.test_domain_memory import BEFORE, restore
from vmckpt.units import MIB

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
RESERVED, PAGE_BYTES = Path("/proc/sys/vm/nr_hugepages"), 2 * MIB


def test_a_module_that_is_plugged_in_is_part_of_it(secured: Machines) -> None:
    for made in in_blocks(secured):
        asyncio.run(booted(made))
        module = made.shared / "dom-module.xml"
        module.write_text(MODULE)
        made.virsh("lab-a", "attach-device", GUEST.name, str(module), "--live", "--config")
        asyncio.run(loaded(made))
        live, definition = xml(made), xml(made, "--inactive")
        assert live.count("<memory model='dimm'>") == 2
        taken = take(made, "one")
        assert taken["memory_bytes"] == sum(BLOCKS) + MODULE_MIB * MIB
        rate = made.ok("dirty-rate", GUEST.name, "--for", "1s")
        assert rate["ram_bytes"] == taken["memory_bytes"]
        done = restore(made)
        assert done.code == 0, done.stderr
        is_as_before(made)
        assert xml(made, "--inactive") == definition
        assert xml(made).count("<memory model='dimm'>") == 2
        made.ok("fork", "one", "--count", "1", "--name", "copy")
        removed(made, FORKS[0])
        made.virsh("lab-a", "detach-device", GUEST.name, str(module), "--config")


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_blocks_in_files_that_others_may_map(secured: Machines, kind: str) -> None:
    backing = f"<memoryBacking><source type='{kind}'/><access mode='shared'/></memoryBacking>"
    for made in in_blocks(secured, backing):
        asyncio.run(loaded(made))
        take(made, "one")
        rate = made.ok("dirty-rate", GUEST.name, "--for", "1s")
        assert (rate["source"], rate["ram_bytes"]) == ("page-tracking", sum(BLOCKS))
        comes_back(made)


def comes_back(made: Machines) -> None:
    """In place, as a copy and as a fork; none of them while its memory is loaded."""
    done = restore(made)
    assert done.code == 0, done.stderr
    assert [one for one in done.result["warnings"] if BEFORE in one]
    is_as_before(made)
    copied = made.ok("checkpoint", "restore", "one", "--as", COPY)
    assert [one for one in copied["warnings"] if BEFORE in one]
    removed(made, COPY)
    (fork,) = made.ok("fork", "one", "--count", "1", "--name", "copy")["forks"]
    assert fork["error"] == ""
    assert [one for one in fork["warnings"] if BEFORE in one]
    removed(made, FORKS[0])
    is_as_before(made)


@contextmanager
def huge_pages(made: Machines, megabytes: int) -> Iterator[None]:
    """So much is reserved for them, and libvirt finds them."""
    before, wanted = int(RESERVED.read_text()), megabytes * MIB // PAGE_BYTES
    mount = "mkdir -p /dev/hugepages; mount -t hugetlbfs none /dev/hugepages"
    try:
        RESERVED.write_text(str(before + wanted))
        if int(RESERVED.read_text()) < before + wanted:
            pytest.skip("there are not as many huge pages")
        assert made.inside("lab-a", "sh", "-c", mount).code == 0
        stop_libvirtd(made, "lab-a")
        start_libvirtd(made, "lab-a")
        yield
    finally:
        made.inside("lab-a", "umount", "/dev/hugepages")
        RESERVED.write_text(str(before))


@pytest.mark.parametrize("source", ["", "<source type='memfd'/>"])
def test_blocks_in_huge_pages(secured: Machines, source: str) -> None:
    """Without a source they are in files of hugetlbfs."""
    made, backing = secured, f"<memoryBacking><hugepages/>{source}</memoryBacking>"
    with huge_pages(made, 2 * sum(BLOCKS) // MIB):
        for _ in in_blocks(made, backing):
            asyncio.run(loaded(made))
            words = made.virsh("lab-a", "dumpxml", GUEST.name)
            assert "<hugepages/>" in words
            take(made, "one")
            # Tracked whole, they would all count as written at once.
            rate = made.ok("dirty-rate", GUEST.name, "--for", "1s")
            assert rate["source"] == "libvirt-page-sampling"
            assert "huge pages" in rate["why"]
            comes_back(made)
            take(made, "two")
