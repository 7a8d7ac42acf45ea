"""VMs with memory in huge pages: checkpoints, restores, forks and protection as of any other."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.test_adopt import HAND, adopt, by_hand
from tests.qemu.test_adopted_blocks import BLOCKS, under_load
from tests.qemu.test_adopted_copies import AGENT, has_run_on, words
from tests.qemu.test_checkpoint import load, sound
from tests.qemu.world import image, qemu, world
from vmckpt.lab.guests.labguest import LabGuest

PAGES = 420
RESERVED = Path("/proc/sys/vm/nr_hugepages")


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Path]:
    """A directory of huge pages, for the test."""
    before = int(RESERVED.read_text())
    try:
        RESERVED.write_text(str(before + PAGES))
    except PermissionError:
        pytest.skip("only root reserves huge pages")
    try:
        if int(RESERVED.read_text()) < before + PAGES:
            pytest.skip("there are not as many huge pages")
        subprocess.run(["mount", "-t", "hugetlbfs", "none", str(tmp_path)], check=True)
        try:
            yield tmp_path
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)
    finally:
        RESERVED.write_text(str(before))


@pytest.mark.parametrize(("version", "memory"), [("10.0", "160M"), ("7.2", "161M")])
def test_a_vm_in_huge_pages_has_checkpoints_and_comes_back(
    pages: Path, version: str, memory: str
) -> None:
    """161 MiB are no whole huge pages, which 10.0 refuses: the file has a MiB more then."""
    with world(qemu(version), qemu(version)) as made:
        guest = LabGuest("guest", 1, image(), memory=memory, disk="64M")
        path = made.shared / "guest.toml"
        spec = guest.spec().replace('path = "guest.', 'image = "guest.')
        path.write_text(f'ram_dir = "{pages}"\n{spec}')
        made.ok("vm", "run", str(path), "--host", "lab-a")

        async def busy() -> None:
            control = await guest.control(made.lab)
            await load(control)
            await control.close()

        asyncio.run(busy())
        taken: dict[str, Any] = made.ok("checkpoint", "create", "guest", "--name", "one")
        for words in ([], ["--eager"]):
            made.ok("checkpoint", "restore", taken["id"], "--in-place", *words)
            asyncio.run(sound(made, guest))
        assert list(pages.rglob("ram"))
        made.ok("replicate", "start", "guest", "lab-b")
        made.ok("replicate", "failover", "guest")
        asyncio.run(sound(made, guest))
        made.ok("vm", "stop", "guest", "--force")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_blocks_in_huge_pages_are_copied_into_huge_pages(pages: Path) -> None:
    style = f"{BLOCKS} {AGENT}".replace(
        "memory-backend-ram,", f"memory-backend-file,mem-path={pages},share=on,prealloc=on,"
    )
    with world(qemu("10.0")) as made, by_hand(made, style, monitors=3):
        adopt(made)
        assert made.ok("vm", "show", "hand")["cannot"] == ["replicate"]
        asyncio.run(under_load(made, 200))
        made.ok("checkpoint", "create", "hand", "--name", "point")
        made.ok("checkpoint", "restore", "point", "--as", "copy")
        has_run_on(made, "copy")
        assert any(f'"mem-path":"{pages}/vmckpt-' in word for word in words(made, "copy"))
        made.ok("checkpoint", "create", "copy", "--name", "of-copy")
        made.ok("vm", "stop", "copy", "--force")
        made.ok("vm", "rm", "copy", "--disks")
        made.ok("vm", "stop", "hand", "--force")
        made.ok("checkpoint", "restore", "point", "--in-place")
        asyncio.run(sound(made, HAND))
        made.ok("vm", "stop", "hand", "--force")
