"""A checkpoint that this site did not take: what it names is refused by name, or trusted."""

import pytest

from tests.qemu.test_checkpoint import guest
from tests.qemu.world import image, qemu, world
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest


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


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_foreign_group_goes_back_together_once_it_is_trusted() -> None:
    with world(qemu("10.0")) as made:
        names = ("web", "db")
        for number, name in enumerate(names, 1):
            made.run_guest(LabGuest(name, number, image(), memory="128M", disk="64M"), "lab-a")
        made.ok("checkpoint", "create", "--group", ",".join(names), "--name", "cut")
        for name in names:
            made.ok("vm", "stop", name, "--force")
            made.ok("vm", "rm", name)
        # Of another site: that has another key.
        (made.state_dir / "site.key").write_text("ab" * 32)
        words = ("checkpoint", "restore", "--group", "cut", "--host", "lab-a")
        refused = made.vmckpt(*words)
        assert refused.code == 4, refused
        assert f"{image()}/vmlinuz" in refused.error["why"]
        assert "--trust" in refused.error["remedy"]
        assert made.qemus() == []
        assert made.ok("vm", "list")["vms"] == []
        back = made.ok(*words, "--trust")
        assert set(back["members"]) == set(names)
        for name in names:
            assert made.ok("vm", "show", name)["state"] == "running"
            eventually(lambda vm=name: made.ok("vm", "show", vm)["operation"] is None, 60, "whole")
            made.ok("vm", "stop", name, "--force")
        images = {
            path.name.partition("-0-")[0] for path in (made.state("lab-a") / "images").iterdir()
        }
        assert images == set(names), "their disks are images made for them"
