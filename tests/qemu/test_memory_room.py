"""Two VMs that do not fit together: the second is refused, with figures, and the first lives."""

from pathlib import Path

import pytest

from tests.kinds import VERSIONS
from tests.qemu.test_checkpoint import guest
from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest

MIB = 1 << 20


@pytest.mark.timeout(300)
def test_memory_is_not_promised_twice() -> None:
    with world(qemu("10.0")) as made:
        ram = made.state("lab-a") / "ram"
        ram.mkdir()
        with made.small("lab-a", "ram", 300 * MIB):
            spec = guest().spec().replace("memory =", f'ram_dir = "{ram}"\nmemory =', 1)
            file = made.shared / "guest.toml"
            file.write_text(spec)
            made.ok("vm", "run", str(file), "--host", "lab-a")
            other = LabGuest("other", 2, image(), memory="192M", disk=None)
            second = made.shared / "other.toml"
            second.write_text(other.spec().replace("memory =", f'ram_dir = "{ram}"\nmemory =', 1))
            refused = made.vmckpt("vm", "run", str(second), "--host", "lab-a")
            assert refused.code == 4, refused
            assert "192.0 MiB" in refused.error["why"] or "192 MiB" in refused.error["why"]
            assert "overcommit" in refused.error["remedy"]
            assert len(made.qemus()) == 1
            # A fork's private pages count as well, and its shared ones.
            made.ok("checkpoint", "create", "guest", "--name", "point")
            copy = made.vmckpt("checkpoint", "restore", "point", "--as", "copy")
            assert copy.code == 4, copy
            # Who wants it all the same says so.
            text = second.read_text()
            second.write_text(text.replace("memory =", "overcommit = true\nmemory =", 1))
            made.ok("vm", "run", str(second), "--host", "lab-a")
            for name in ("other", "guest"):
                made.ok("vm", "stop", name, "--force")
                made.ok("vm", "rm", name)


def in_ram(guest: LabGuest, ram: Path, *, greedy: bool = False) -> str:
    """`greedy`: it may, and does, write 140 MiB besides what its kernel has."""
    text, more = guest.spec(), ""
    if greedy:
        more = "overcommit = true\n"
        text = text.replace("vk.id=", "vk.mem=rate=200M,set=140M,content=random vk.id=")
    return text.replace("memory =", f'ram_dir = "{ram}"\n{more}memory =', 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_guests_that_were_overcommitted_run_and_one_that_dies_says_of_what(version: str) -> None:
    with world(qemu(version)) as made:
        one, two = (LabGuest(f"g{n}", n, image(), memory="256M", disk=None) for n in (1, 2))
        ram = made.state("lab-a") / "ram"
        ram.mkdir()
        with made.small("lab-a", "ram", 270 * MIB):
            run_text(made, in_ram(one, ram))
            made.ok("checkpoint", "create", "g1", "--name", "point")
            refused = made.vmckpt("fork", "point", "--count", "2")
            assert refused.code == 4, refused
            assert "--overcommit" in refused.error["remedy"]
            forked = made.ok("fork", "point", "--count", "2", "--overcommit")
            assert [fork["error"] for fork in forked["forks"]] == ["", ""]
            for name in ("g1-fork-1", "g1-fork-2"):
                assert made.ok("vm", "show", name)["state"] == "running"
                end(made, name)
            # A third of it is taken: this one comes to write more than the rest.
            run_text(made, in_ram(two, ram, greedy=True))
            eventually(lambda: len(made.qemus()) < 2, 150, "one of them finds no room")
            shown = [made.ok("vm", "show", name) for name in ("g1", "g2")]
            died = [one for one in shown if one["state"] == "stopped"]
            assert died
            for vm in died:
                assert "SIGBUS" in vm["ended"], vm
                assert str(ram) in vm["ended"]
            assert all(vm["ended"] is None for vm in shown if vm not in died)
            name = str(died[0]["name"])
            # One that is told to stop is not said to have died.
            for vm in shown:
                end(made, str(vm["name"]), remove=False)
                assert made.ok("vm", "show", str(vm["name"]))["ended"] is None
            made.ok("vm", "start", name)
            end(made, name)


def run_text(made: World, spec: str) -> None:
    file = made.shared / "vm.toml"
    file.write_text(spec)
    made.ok("vm", "run", str(file), "--host", "lab-a")


def end(made: World, name: str, *, remove: bool = True) -> None:
    made.ok("vm", "stop", name, "--force")
    if remove:
        made.ok("vm", "rm", name)
