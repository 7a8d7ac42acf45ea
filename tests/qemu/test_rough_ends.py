"""The watcher has gone, a command was killed while it started a VM, a QEMU was replaced."""

import asyncio
import json
import os
import signal
import subprocess
import time

import pytest

from tests.qemu.world import COMMAND, World, image, loaded, qemu, world
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest

ONE = "one"


def guest(**more: object) -> LabGuest:
    return LabGuest(ONE, 1, image(), **more)  # type: ignore[arg-type]


def deaf(made: World, *words: str) -> int:
    """A command whose stderr no one reads any longer, from its second line on."""
    reading, writing = os.pipe()
    environment = os.environ | {"VMCKPT_STATE_DIR": str(made.state_dir)}
    with subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.DEVNULL, stderr=writing, env=environment
    ) as command:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        return command.wait(60)


@pytest.mark.parametrize("method", ["precopy", "postcopy", "stop"])
def test_a_migration_goes_on_when_nobody_listens(method: str) -> None:
    with world(qemu("10.0"), qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")

        async def move() -> None:
            async with loaded(made, guest()) as control:
                assert (
                    await asyncio.to_thread(deaf, made, "migrate", ONE, "lab-b", "--method", method)
                    == 0
                )
                await control.ping()

        asyncio.run(move())
        shown = made.ok("vm", "show", ONE)
        assert (shown["host"], shown["state"]) == ("lab-b", "running")
        assert made.files("lab-a") == []


def test_a_start_that_was_killed_leaves_no_qemu_behind() -> None:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        made.ok("vm", "stop", ONE, "--force")
        directory = made.lab.host("lab-a").state_dir / "vms" / ONE
        before = {entry.name for entry in directory.glob("qemu-*")}
        starting = made.begin("vm", "start", ONE)
        while not [e for e in directory.glob("qemu-*/qmp.sock") if e.parent.name not in before]:
            time.sleep(0.0005)
        starting.send_signal(signal.SIGKILL)
        starting.communicate()
        # One more start succeeds, and only its QEMU runs; or the killed one had come far enough.
        again = made.vmckpt("vm", "start", ONE)
        assert again.code in (0, 4), again.stderr
        shown = made.ok("vm", "show", ONE)
        assert shown["state"] == "running"
        assert [one.pid for one in made.qemus(ONE)] == [shown["pid"]]
        made.ok("vm", "stop", ONE, "--force")
        made.ok("vm", "rm", ONE)
        assert made.files("lab-a") == []


def test_what_a_killed_run_left_is_gone_with_the_next_one() -> None:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        # As a kill before vm.json was written leaves it.
        directory = made.lab.host("lab-a").state_dir / "vms" / ONE
        (directory / "vm.json").unlink()
        orphan = made.qemus(ONE)
        assert len(orphan) == 1
        assert made.ok("vm", "list")["vms"] == []
        made.run_guest(guest(), "lab-a")
        shown = made.ok("vm", "show", ONE)
        assert [one.pid for one in made.qemus(ONE)] == [shown["pid"]]
        assert shown["pid"] != orphan[0].pid


def test_the_qemu_that_runs_is_asked_and_not_the_one_on_disk() -> None:
    with world(qemu("7.2"), qemu("10.0")) as made:
        made.run_guest(guest(machine="pc-q35-7.2", disk=None), "lab-a")
        # The host's package was updated while the VM ran.
        entry = made.state_dir / "hosts" / "lab-a.json"
        entry.write_text(json.dumps(json.loads(entry.read_text()) | {"qemu": str(qemu("10.0"))}))
        refused = made.vmckpt("migrate", ONE, "lab-b", "--method", "postcopy", "--dry-run")
        assert refused.code == 4
        checks = {check["code"]: check for check in refused.result["targets"][0]["checks"]}
        assert checks["tcg-dirty-log"]["verdict"] == "refuse"
        assert "7.2" in checks["tcg-dirty-log"]["reason"]
        assert made.ok("migrate", ONE, "lab-b")["method"] == "stop"


def test_what_auto_came_to_stays_when_the_vm_starts_again() -> None:
    with world(qemu("7.2")) as made:
        made.run_guest(guest(disk=None), "lab-a")
        assert made.ok("vm", "show", ONE)["machine"] == "pc-q35-7.2"
        made.ok("vm", "stop", ONE, "--force")
        entry = made.state_dir / "hosts" / "lab-a.json"
        entry.write_text(json.dumps(json.loads(entry.read_text()) | {"qemu": str(qemu("10.0"))}))
        assert made.ok("vm", "start", ONE)["machine"] == "pc-q35-7.2"


def test_a_read_only_image_stays_where_others_read_it() -> None:
    with world(qemu("10.0"), qemu("10.0")) as made:
        images = {name: made.lab.host(name).state_dir / "images" for name in ("lab-a", "lab-b")}
        images["lab-a"].mkdir(mode=0o700)
        for name in ("tools.raw", "mine.raw"):
            (images["lab-a"] / name).write_bytes(name.encode() * 102_400)
        disks = {"one": ("tools.raw", "mine.raw"), "two": ("tools.raw",)}
        for number, (name, used) in enumerate(disks.items(), 1):
            spec = made.state_dir / f"{name}.toml"
            text = LabGuest(name, number, image(), disk=None).spec()
            form = '[[disks]]\nimage = "{}"\nformat = "raw"\nread_only = true\n'
            spec.write_text(text + "".join(form.format(one) for one in used))
            made.ok("vm", "run", str(spec), "--host", "lab-a")

        def there(host: str) -> list[str]:
            return sorted(path.name for path in images[host].iterdir())

        made.ok("migrate", "one", "lab-b")
        assert (there("lab-a"), there("lab-b")) == (["tools.raw"], ["mine.raw", "tools.raw"])
        # What is there already, and the same, need not go over.
        made.ok("migrate", "one", "lab-a")
        assert there("lab-a") == ["mine.raw", "tools.raw"]
        (images["lab-b"] / "tools.raw").write_bytes(b"another")
        refused = made.vmckpt("migrate", "two", "lab-b")
        assert (refused.code, "disk-target" in refused.error["why"]) == (4, True)


def test_a_repeated_command_is_told_who_is_at_work() -> None:
    """Not that the copy under way should be removed."""
    with world(qemu("10.0"), qemu("10.0")) as made:
        spec = made.state_dir / "one.toml"
        spec.write_text(guest(disk="64M").spec().replace('path = "one.', 'image = "one.'))
        made.ok("vm", "run", str(spec), "--host", "lab-a")
        copy = made.lab.host("lab-b").state_dir / "images" / "one.qcow2"
        moving = made.begin("migrate", ONE, "lab-b", "--bandwidth", "20MB")
        eventually(copy.exists, 30, "the copy")
        again = made.vmckpt("migrate", ONE, "lab-b")
        assert (again.code, "migrate to lab-b" in again.error["why"]) == (5, True)
        checked = made.vmckpt("check", ONE, "lab-b")
        assert checked.code == 4
        assert checked.result["targets"][0]["checks"][0]["code"] == "busy"
        out, err = moving.communicate(timeout=90)
        assert moving.returncode == 0, out + err
