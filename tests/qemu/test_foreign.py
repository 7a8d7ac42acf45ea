"""A checkpoint that this site did not take: what it names is refused by name, or trusted."""

import pytest

from tests.qemu.test_checkpoint import guest
from tests.qemu.world import image, qemu, world


@pytest.mark.timeout(300)
def test_an_imported_checkpoint_opens_nothing_of_the_host_unless_it_is_trusted() -> None:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        kernel = f"{image()}/vmlinuz"
        taken = made.ok("checkpoint", "create", "guest", "--name", "ours")
        assert made.ok("checkpoint", "show", "ours")["foreign"] is False
        exported = str(made.shared / "point.vmckpt")
        made.ok("store", "export", exported, taken["id"], "--store", "lab-a:")
        made.ok("checkpoint", "rm", taken["id"], "--yes")
        disk = made.shared / "guest.qcow2"
        before = disk.stat().st_ino
        # Of another site: that has another key.
        (made.state_dir / "site.key").write_text("ab" * 32)
        made.ok("store", "import", exported, "--store", "lab-a:")
        shown = made.ok("checkpoint", "show", "ours")
        assert shown["foreign"] is True
        assert any(kernel in text for text in shown["opens"])
        # In place, and as a copy: its VM is here, whose spec names the same.
        made.ok("checkpoint", "restore", "ours", "--in-place", "--yes", "--eager")
        made.ok("checkpoint", "restore", "ours", "--as", "copy", "--eager")
        for name in ("guest", "copy"):
            made.ok("vm", "stop", name, "--force")
            made.ok("vm", "rm", name)
        assert disk.stat().st_ino != before, "in place its own disk is replaced"
        before = disk.stat().st_ino
        for words in (("restore",), ("restore", "--as", "copy-2"), ("fork",)):
            verb = ("fork",) if words == ("fork",) else ("checkpoint", words[0])
            done = made.vmckpt(*verb, "ours", *words[1:], "--host", "lab-a")
            assert done.code in {4, 7}, done
            if verb != ("fork",):
                assert kernel in done.error["why"]
                assert "--trust" in done.error["remedy"]
        assert made.qemus() == []
        restored = made.ok("checkpoint", "restore", "ours", "--host", "lab-a", "--trust", "--eager")
        assert restored["vm"] == "guest"
        images = [path.name for path in (made.state("lab-a") / "images").iterdir()]
        assert f"guest-0-{taken['id'][:8]}.qcow2" in images
        assert disk.stat().st_ino == before, "a foreign checkpoint's disk is an image made for it"
        made.ok("vm", "stop", "guest", "--force")
