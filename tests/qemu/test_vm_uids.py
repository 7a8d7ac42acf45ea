"""Each VM's QEMU as a user of its own: all operations, and what that user can reach.

Hosts of a lab with `--vm-uids`, real guests, whose QEMU lies where every user can reach it.
"""

import asyncio
import json
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kinds import VERSIONS
from tests.qemu.reachable import reachable
from tests.qemu.test_checkpoint import sound
from tests.qemu.world import World, loaded, world
from tests.waiting import eventually
from vmckpt.hosts.uids import parse_uids
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.vm.users.users import TUN, USERFAULTFD, VmUser

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.timeout(900),
]
RANGE = "2000000000-2000999999"
UIDS = parse_uids(RANGE)
STRANGER = 65534
INTRUDER = Path(__file__).parents[1] / "intruder.py"
OF_PROCESSES = ("mem", "environ", "maps", "fd", "root", "cwd", "map_files", "pagemap", "stack")


@contextmanager
def lab(version: str) -> Iterator[tuple[World, Path]]:
    """Two hosts with users for VMs, and the guest's image."""
    with reachable(version) as (program, image), world(program, program) as made, devices():
        for directory in (made.state_dir, made.state_dir / "lab"):
            directory.chmod(0o711)
        for host in ("lab-a", "lab-b"):
            made.ok("host", "set", host, "--vm-uids", RANGE)
        yield made, image


@contextmanager
def devices() -> Iterator[None]:
    """This machine's devices are as they were after the block."""
    before = {path: path.stat() for path in (USERFAULTFD, TUN) if path.exists()}
    try:
        yield
    finally:
        for path, found in before.items():
            os.chown(path, found.st_uid, found.st_gid)
            path.chmod(stat.S_IMODE(found.st_mode))


def users(made: World) -> dict[str, int]:
    """The uid of each VM that runs, each QEMU being that user alone and without any right."""
    found: dict[str, int] = {}
    for process in made.qemus():
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        status = {name: words.split() for name, _, words in (line.partition(":") for line in lines)}
        name = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        vm = name[name.index("-name") + 1].partition(",")[0]
        assert len({*status["Uid"], *status["Gid"]}) == 1, status
        assert set(map(int, status["Groups"])) == {UIDS.first, UIDS.last}
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[kind][0], 16) == 0, kind
        assert (status["NoNewPrivs"], status["Seccomp"]) == (["1"], ["2"])
        uid = int(status["Uid"][0])
        assert found.setdefault(vm, uid) == uid, f"{vm} is the same user on both hosts"
        assert UIDS.first < uid < UIDS.last
    assert len(set(found.values())) == len(found)
    return found


def reached(uid: int, paths: Iterable[Path]) -> dict[str, list[str]]:
    """What a user gets done with each path; a VM's has its groups."""
    with tempfile.TemporaryDirectory(dir="/tmp") as own:
        os.chown(own, uid, uid)
        program = Path(own) / "intruder.py"
        program.write_text(INTRUDER.read_text())
        program.chmod(0o644)
        words = ["/usr/bin/python3", "-I", str(program), own]
        if uid in UIDS:
            words = VmUser(uid, UIDS).command(words)
        else:
            words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *words]
        said = subprocess.run(
            words, input="".join(f"{path}\n" for path in paths), capture_output=True, text=True,
            check=True, cwd="/",
        )  # fmt: skip
        ready, *answers = said.stdout.splitlines()
    assert ready == "ready"
    told: list[dict[str, Any]] = [json.loads(answer) for answer in answers]
    return {one["path"]: one["done"] for one in told}


def of_vm(made: World, name: str) -> list[Path]:
    """All that there is of one VM: its directory, memory, image and process."""
    found: list[Path] = []
    for host in ("lab-a", "lab-b"):
        state = made.state(host)
        found += [state / "vms" / name, *(state / "vms" / name).rglob("*")]
        found += (state / "images").glob(f"*{name}*")
    for memory in Path("/dev/shm").glob(f"vmckpt-{name}-*"):
        found += [memory, *memory.iterdir()]
    for process in made.qemus(name):
        found += [Path(f"/proc/{process.pid}/{part}") for part in OF_PROCESSES]
    return found


def run_two(made: World, image: Path) -> tuple[LabGuest, LabGuest]:
    guests = tuple(
        LabGuest(f"guest-{number}", number, image, memory="160M", disk="64M") for number in (1, 2)
    )
    made.run_guest(guests[0], "lab-a", own_disk=True)
    made.run_guest(guests[1], "lab-b", own_disk=True)
    return guests[0], guests[1]


def no_taps_are_left(made: World) -> None:
    for host in ("lab-a", "lab-b"):
        listed = subprocess.run(
            [*made.lab.host(host).enter, "ip", "-br", "link"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "\nvk" not in listed.stdout


@pytest.mark.parametrize("version", ["10.0", "7.2"])
def test_one_vm_reaches_nothing_of_another(version: str) -> None:
    with lab(version) as (made, image):
        run_two(made, image)
        who = users(made)
        assert who.keys() == {"guest-1", "guest-2"}
        if version == "7.2":
            return
        taken = made.ok("checkpoint", "create", "guest-2")["id"]
        theirs = of_vm(made, "guest-2")
        for part in ("ram", "promised", "guest-2.qcow2", "qmp.sock", "console.log", "vm.json"):
            assert part in {path.name for path in theirs}, part
        for uid in (who["guest-1"], STRANGER):
            got = {path: done for path, done in reached(uid, theirs).items() if done}
            assert not got, got
        state = made.state("lab-b")
        shared = [path for path in state.rglob("*") if "vms" not in path.parts]
        shared += [*(made.state_dir / "hosts").rglob("*"), *Path("/dev/shm").iterdir()]
        tried = reached(who["guest-1"], shared)
        got = {path: done for path, done in tried.items() if done and "vmckpt" in path}
        assert not got, got
        # Of its own it reaches what its QEMU was given, and changes none of root's records.
        ours = of_vm(made, "guest-1")
        mine = {Path(path).name: done for path, done in reached(who["guest-1"], ours).items()}
        assert {"read", "write"} <= set(mine["ram"]) & set(mine["guest-1.qcow2"])
        assert not mine["vm.json"]
        assert not mine["identity"]
        assert not mine["user.json"]
        # A link to another's monitor, put where its own was.
        [own] = [path for path in ours if path.name == "own"]
        [other] = [path for path in theirs if path.name == "own"]
        (own / "qmp.sock").rename(own / "kept")
        (own / "qmp.sock").symlink_to(other / "qmp.sock")
        os.chown(own / "qmp.sock", who["guest-1"], -1, follow_symlinks=False)
        refused = made.vmckpt("migrate", "guest-1", "lab-b")
        assert refused.code != 0
        assert "another user created a link there" in refused.stderr
        assert users(made) == who
        (own / "kept").rename(own / "qmp.sock")
        made.ok("checkpoint", "rm", taken)
        for name in ("guest-1", "guest-2"):
            made.ok("vm", "stop", name, "--force")
            made.ok("vm", "rm", name, "--disks")
        no_taps_are_left(made)


@pytest.mark.parametrize("version", VERSIONS)
def test_checkpoints_are_taken_and_restored(version: str) -> None:
    with lab(version) as (made, image):
        guest = LabGuest("guest", 1, image, memory="160M", disk="64M")
        made.run_guest(guest, "lab-a", own_disk=True)

        busy(made, guest)
        kinds = ("epoch", "file")
        epoch, whole = (
            made.ok("checkpoint", "create", "guest", "--kind", kind)["id"] for kind in kinds
        )
        for words in ((epoch,), (epoch, "--eager"), (whole,)):
            made.ok("checkpoint", "restore", *words, "--in-place")
            asyncio.run(sound(made, guest))
        made.ok("snapshot", "save", "guest", "one")
        made.ok("snapshot", "load", "guest", "one", "--yes")
        made.ok("checkpoint", "restore", epoch, "--as", "copy")
        if version == "10.0":
            made.ok("fork", epoch, "--count", "2", "--name", "fork")
            forks = users(made)
            assert forks.keys() == {"guest", "copy", "fork-1", "fork-2"}
            # What they share none of them can write to, nor to what is another's.
            rams = [path for path in of_vm(made, "fork-1") if path.name == "ram"]
            assert set(*reached(forks["fork-1"], rams).values()) == {"read"}
            got = reached(forks["fork-2"], of_vm(made, "fork-1"))
            assert not any(got.values()), got
            made.ok("vm", "stop", "fork-1", "--force")
            made.ok("vm", "start", "fork-1")
        else:
            refused = made.vmckpt("fork", epoch, "--count", "2", "--name", "fork")
            assert (refused.code, refused.error["kind"]) == (4, "refused")
            assert "QEMU 8.2" in refused.error["remedy"]
        users(made)


def busy(made: World, guest: LabGuest) -> None:
    """It writes to its memory and its disk from here on, a little."""

    async def ask() -> None:
        control = await guest.control(made.lab)
        await control.load_memory("rate=2M set=16M pattern=uniform content=random")
        await control.load_disk("rate=500K size=4M")
        await control.close()

    asyncio.run(ask())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_vm_moves_and_is_taken_over(version: str) -> None:
    with lab(version) as (made, image):
        own = LabGuest("own", 1, image, memory="160M", disk="64M")
        shared = LabGuest("shared", 2, image, memory="160M", disk="64M", disk_format="raw")
        made.run_guest(own, "lab-a", own_disk=True)
        made.run_guest(shared, "lab-a")
        before = users(made)
        busy(made, shared)
        made.ok("pki", "init")
        made.ok("pki", "issue", "lab-a", "lab-b")
        # QEMU 7.2 as a source loses pages of a guest that runs, whoever it runs as.
        ways: list[tuple[str, ...]] = [
            ("--method", "precopy"),
            ("--method", "postcopy"),
            ("--tls", "require"),
        ]
        if version == "7.2":
            ways = [("--method", "stop"), ("--method", "stop", "--tls", "require")]
        host = {"own": "lab-a", "shared": "lab-a"}

        def move(name: str, *way: str) -> None:
            host[name] = "lab-b" if host[name] == "lab-a" else "lab-a"
            moved = made.ok("migrate", name, host[name], *way)
            assert moved["encryption"] == ("x509" if "require" in way else "psk")

        async def under_load() -> None:
            async with loaded(made, own):
                for way in ways:
                    await asyncio.to_thread(move, "own", *way)
                    assert users(made) == before
                await asyncio.to_thread(move, "shared", *ways[0])
                assert users(made) == before
                for name, more in (("own", ()), ("shared", ("--disks", "shared"))):
                    there = "lab-b" if host[name] == "lab-a" else "lab-a"
                    words = ("replicate", "start", name, there, *more)
                    await asyncio.to_thread(made.ok, *words)
                    assert users(made) == before
                    [process] = [
                        one
                        for one in made.qemus(name)
                        if f"/{host[name]}/" in Path(f"/proc/{one.pid}/cmdline").read_text()
                    ]
                    os.kill(process.pid, 9)
                    await asyncio.to_thread(at_home, made, name, there)
                    host[name] = there
                    await asyncio.to_thread(made.ok, "replicate", "stop", name)
                    assert users(made) == before

        asyncio.run(under_load())
        asyncio.run(sound(made, shared))
        for name in ("own", "shared"):
            made.ok("vm", "stop", name, "--force")
        move("own", "--offline")
        made.ok("vm", "start", "own")
        made.ok("vm", "start", "shared")
        assert users(made) == before
        for name in ("own", "shared"):
            made.ok("vm", "stop", name, "--force")
            made.ok("vm", "rm", name)
        no_taps_are_left(made)


def at_home(made: World, name: str, host: str) -> None:
    def runs_there() -> bool:
        vms = {vm["name"]: vm for vm in made.ok("vm", "list")["vms"]}
        return bool(name in vms and (vms[name]["host"], vms[name]["state"]) == (host, "running"))

    eventually(runs_there, 20, f"{name} runs on {host}")
    time.sleep(0.2)


def test_what_a_user_cannot_reach_is_refused_by_name() -> None:
    with lab("10.0") as (made, image):
        guest = LabGuest("guest", 1, image, memory="160M", disk="64M")
        hidden = made.state_dir / "hidden"
        hidden.mkdir(mode=0o700)
        (hidden / "guest.qcow2").touch()
        spec = made.shared / "guest.toml"
        spec.write_text(guest.spec().replace('path = "guest.', f'path = "{hidden}/guest.'))
        made.ok("host", "check", "lab-a")
        refused = made.vmckpt("vm", "run", str(spec), "--host", "lab-a")
        assert (refused.code, refused.error["kind"]) == (4, "refused")
        assert f"{hidden}/guest.qcow2: {hidden} is closed" in refused.error["why"]
        assert "chmod o+x" in refused.error["remedy"]
        assert not made.files("lab-a")
        made.run_guest(guest, "lab-a", own_disk=True)
        made.state_dir.chmod(0o700)
        check = made.vmckpt("host", "check", "lab-b")
        [found] = [one for one in check.result["checks"] if one["code"] == "vm-uids"]
        assert (check.code, found["verdict"]) == (4, "refuse")
        assert f"{made.state_dir} is closed" in found["reason"]
        refused = made.vmckpt("migrate", "guest", "lab-b")
        assert (refused.code, refused.error["kind"]) == (4, "refused")
        assert "[vm-uids]" in refused.error["why"]
        made.state_dir.chmod(0o711)
        # Another range where images are shared would be another owner.
        assert made.vmckpt("host", "set", "lab-b", "--vm-uids", "1-65536").code == 2
        made.ok("host", "set", "lab-b", "--vm-uids", "1500000000-1500999999")
        made.ok("migrate", "guest", "lab-b")  # its disk is copied
        made.ok("host", "set", "lab-b", "--vm-uids", "none")
        made.ok("migrate", "guest", "lab-a")
