"""Every operation with every kind of VM, on real guests: what works, and what is refused and how.

`make any-vm` walks all cells and writes docs/any-vm.md; `make long` walks them and compares, `make
test` does so with a few.
"""

import asyncio
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.setting import machine
from tests.any_vm import KINDS, OPERATIONS, Cell, Results, read, write
from tests.qemu.device_guest import NAME as WORKER
from tests.qemu.device_guest import job as worker_job
from tests.qemu.device_guest import run_worker, well
from tests.qemu.test_adopt import BLOCKDEV, HAND, kernel
from tests.qemu.test_checkpoint import load, sound
from tests.qemu.world import COMMAND, image, qemu
from tests.real.domains import GUEST, HOSTS, OWN_DISK, remove_domain, run_domain, secure
from tests.real.machines import Machines, machines
from tests.waiting import eventually
from vmckpt.hosts.processes.process import ProcessId, find_by_argument, kill
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.processes import find

WRITE = "VMCKPT_TEST_ANY_VM"  # set by `make any-vm`
OWN = LabGuest("web", 2, image=Path("/"), memory="192M", disk="64M")
MATE = LabGuest("mate", 3, image=Path("/"), memory="96M", disk=None)
NAMES = {"own": OWN.name, "adopted": HAND.name, "domain": GUEST.name}
# The cells that are refused; all others work.
REFUSED = {
    "adopted": {"devices"},
    "domain": {"devices"},
}
CELLS = [(kind, operation) for kind in KINDS for operation in OPERATIONS]
SAMPLE = [("domain", "checkpoint"), ("domain", "fork"), ("adopted", "replicate")]
REFUSAL, ROLLED_BACK = 4, 7
IMAGES = (Path("/var/lib/vmckpt/images"), OWN_DISK.parent)  # each host has its own
STORE, LEASES = "store", "leases"  # in the folder that all hosts share


class RefusedError(Exception):
    """A command of an operation was refused."""

    def __init__(self, words: tuple[str, ...], error: dict[str, Any]) -> None:
        super().__init__(words, error)
        parts = {part: str(error[part]) for part in ("what", "why", "remedy")}
        self.cell = Cell(refused={"command": shlex.join(("vmckpt", *words)), **parts})


@dataclass(frozen=True, slots=True)
class Subject:
    """A guest of some kind on lab-a."""

    made: Machines
    kind: str
    guest: LabGuest

    @property
    def name(self) -> str:
        return self.guest.name

    def do(self, *words: str) -> dict[str, Any]:
        """Run a command. Raises RefusedError; any other failure fails the test."""
        done = self.made.vmckpt(*words)
        if done.code == REFUSAL:
            raise RefusedError(words, done.error)
        assert done.code == 0, f"{words}: exit code {done.code}, {done.stderr}"
        return done.result

    def is_sound(self) -> None:
        """By its own checks, no matter where it runs."""
        asyncio.run(sound(self.made, self.guest))

    def take(self, *words: str) -> dict[str, Any]:
        return self.do("checkpoint", "create", self.name, "--name", "point", *words)

    def migrated(self, host: str, *words: str) -> dict[str, Any]:
        return self.do("migrate", self.name, host, *words)

    def removed(self, *names: str) -> None:
        """Remove copies that run on their own."""
        for name in names:
            assert self.made.ok("vm", "show", name)["state"] == "running"
            self.made.ok("vm", "stop", name, "--force")
            self.made.ok("vm", "rm", name, "--disks")


# -- guests ---------------------------------------------------------------------------------------


@contextmanager
def own(made: Machines) -> Iterator[LabGuest]:
    made.run_guest(with_image(OWN), "lab-a", own_disk=True)
    yield OWN


@contextmanager
def adopted(made: Machines) -> Iterator[LabGuest]:
    """A QEMU that another program started on lab-a."""
    disk = str(IMAGES[0] / "root.qcow2")
    assert made.inside("lab-a", "mkdir", "-p", str(IMAGES[0])).code == 0
    create = ("qemu-img", "create", "-q", "-f", "qcow2", disk, "64M")
    assert made.inside("lab-a", *create).code == 0
    with by_hand(made, BLOCKDEV.replace("filename=root.qcow2", f"filename={disk}"), "hand"):
        link = ("ip", "link", "set", "dev", "hand0", "master", "br0", "up")
        eventually(lambda: made.inside("lab-a", *link).code == 0, 60, "its tap")
        made.ok("vm", "adopt", HAND.name, "--host", "lab-a", *monitors(made, "hand"))
        yield HAND


@contextmanager
def domain(made: Machines) -> Iterator[LabGuest]:
    try:
        run_domain(made, "lab-a", disk=OWN_DISK)
        yield GUEST
    finally:
        remove_domain(made)


GUESTS = {"own": own, "adopted": adopted, "domain": domain}


def with_image(guest: LabGuest) -> LabGuest:
    return LabGuest(guest.name, guest.number, image(), memory=guest.memory, disk=guest.disk)


def monitors(made: Machines, name: str) -> list[str]:
    """How to name the sockets of a QEMU that was started by hand."""
    return [word for n in range(3) for word in ("--qmp", str(made.shared / f"{name}{n}.sock"))]


@contextmanager
def by_hand(made: Machines, style: str, name: str) -> Iterator[None]:
    """A QEMU that is started on lab-a without vmckpt, for the block."""
    target = f"--target={made.lab.host('lab-a').holder.pid}"
    kinds = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root")
    argv = ["nsenter", target, *kinds, f"--wd={made.here('lab-a', made.shared)}"]
    argv += ["qemu-system-x86_64", *style.split(), *kernel()]
    argv += [word for n in range(3) for word in ("-qmp", f"unix:{name}{n}.sock,server,nowait")]
    log = made.state_dir / f"{name}.log"
    with log.open("wb") as output:
        started = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        eventually((made.shared / f"{name}2.sock").exists, 60, "its last monitor")
        yield
    finally:
        print(log.read_text(errors="replace"))
        for process in of_hand(made, f"{name}0.sock"):
            kill(process)
        started.wait(30)


def of_hand(made: Machines, sock: str) -> list[ProcessId]:
    ours = {process.pid for process in find(made.lab.directory)}
    return [one for one in find_by_argument(f"unix:{sock},") if one.pid in ours]


# -- operations -----------------------------------------------------------------------------------


def migrate(vm: Subject) -> str:
    there = vm.migrated("lab-b")
    vm.is_sound()
    vm.migrated("lab-a")
    return downtime(there)


def downtime(moved: dict[str, Any]) -> str:
    guest = moved["guest_downtime_ms"]
    return f"downtime {moved['downtime_ms'] if guest is None else guest:.0f} ms"


def plan(vm: Subject) -> str:
    calibrate(vm.made)
    planned = vm.do("plan", vm.name, "lab-b", "--for", "2s")
    assert planned["way"], planned
    words = ("--finish-within", "60s", "--max-downtime", "2s")
    moved = vm.migrated("lab-b", *words)
    vm.migrated("lab-a", *words)
    return f"took {moved['total_time_s']:.1f} s, {downtime(moved)}"


@cache
def calibrate(made: Machines) -> None:
    made.ok("host", "calibrate", "lab-a", "lab-b", "--size", "128M")


def dirty_rate(vm: Subject) -> str:
    rate = vm.do("dirty-rate", vm.name, "--for", "2s")
    return f"{rate['working_set_bytes'] / 1e6:.0f} MB in {rate['took_s']:.1f} s"


def checkpoint(vm: Subject) -> str:
    taken = vm.take()
    return f"pause {taken['pause_ms']:.1f} ms"


def restore(vm: Subject) -> str:
    vm.take()
    return running(vm.do("checkpoint", "restore", "point", "--in-place", "--yes"))


def running(restored: dict[str, Any]) -> str:
    return f"runs after {restored['running_ms']:.0f} ms"


def restore_as(vm: Subject) -> str:
    vm.take()
    done = vm.do("checkpoint", "restore", "point", "--as", "copy")
    vm.removed("copy")
    return running(done)


def restore_elsewhere(vm: Subject) -> str:
    # One of its own: vmckpt remembers stores, and makes none where one was lost.
    store = f"lab-a:{vm.made.shared / STORE}-{vm.kind}"
    vm.do("store", "init", store)
    vm.take("--store", store)
    vm.do("vm", "stop", vm.name, "--force")
    vm.do("vm", "rm", vm.name, "--disks")
    for folder in IMAGES:  # that of an adopted VM stays
        vm.made.inside("lab-a", "sh", "-c", f"rm -f {folder}/*")
    done = vm.do("checkpoint", "restore", "point", "--store", store, "--host", "lab-b")
    assert done["host"] == "lab-b"
    vm.is_sound()
    vm.migrated("lab-a")
    return running(done)


def fork(vm: Subject) -> str:
    forks = vm.do("fork", vm.name, "--count", "2", "--name", "copy")["forks"]
    assert [one["error"] for one in forks] == ["", ""], forks
    vm.removed("copy-1", "copy-2")
    # What forks of a checkpoint build on stays for the next ones.
    vm.do("host", "images", "lab-a", "--remove-unused", "--yes")
    return f"both run after {max(one['took_ms'] for one in forks):.0f} ms"


def guard(vm: Subject) -> str:
    for command, expected in (("true", 0), ("false", ROLLED_BACK)):
        words = ("guard", vm.name, "--for", "1s", "--every", "1s", "--json", "--", command)
        done = subprocess.run(
            [*COMMAND, *words], env=vm.made.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        if done.returncode == REFUSAL:
            raise RefusedError(words[:-1], json.loads(done.stdout)["error"])
        assert done.returncode == expected, done
        vm.is_sound()
    for point in points(vm):
        vm.do("checkpoint", "unpin", point, "--force")
    return ""


def schedule(vm: Subject) -> str:
    vm.do("schedule", "add", vm.name, "--every", "1h", "--keep-last", "2")
    vm.do("schedule", "run-due")
    assert len(points(vm)) == 1
    vm.do("schedule", "rm", vm.name)
    return ""


def group(vm: Subject) -> str:
    vm.made.run_guest(with_image(MATE), "lab-b")
    try:
        asyncio.run(booted(vm.made, MATE))
        members = f"{vm.name},{MATE.name}"
        words = ("--group", members, "--name", "cut", "--max-hold", "3s")
        done = vm.do("checkpoint", "create", *words)
        vm.do("checkpoint", "restore", "--group", "cut", "--in-place", "--yes")
    finally:
        vm.made.vmckpt("vm", "stop", MATE.name, "--force")
        vm.made.vmckpt("vm", "rm", MATE.name)
        (vm.made.shared / "mate.toml").unlink()
    return f"stopped within {done['skew_ms']:.1f} ms"


def replicate(vm: Subject) -> str:
    lease = ("--lease", str(vm.made.shared / LEASES))
    vm.do("replicate", "start", vm.name, "lab-b", *lease)
    asyncio.run(asyncio.sleep(3.0))
    (primary,) = (
        side for side in vm.do("replicate", "status", vm.name)["sides"] if side["role"] == "primary"
    )
    vm.do("replicate", "failover", vm.name)
    vm.is_sound()
    back = vm.do("replicate", "failback", vm.name)
    vm.do("replicate", "stop", vm.name)
    # A copy of its disk stays for the next `replicate start`; a domain's is where libvirt has it.
    vm.do("host", "images", "lab-b", "--remove-unused", "--yes")
    if vm.kind == "domain":
        assert vm.made.inside("lab-b", "rm", str(OWN_DISK)).code == 0
    pauses = f"median pause {primary['pause_p50_ms']:.1f} ms"
    # Of a guest that sends vmckpt's heartbeats; others are not heard from outside.
    back_ms = back.get("guest_downtime_ms")
    return pauses if back_ms is None else f"{pauses}, failback: downtime {back_ms:.0f} ms"


def drain(vm: Subject) -> str:
    there = vm.do("drain", "lab-a", "--for", "500ms")
    assert there["moved"] == [{"vm": vm.name, "host": "lab-b"}]
    back = vm.do("undrain", "lab-a", "--for", "500ms")
    assert back["moved"] == [{"vm": vm.name, "host": "lab-a"}]
    return f"took {there['took_s']:.1f} s"


def devices(vm: Subject) -> str:
    return {"own": own_device, "adopted": adopted_device, "domain": domain_device}[vm.kind](vm)


def own_device(vm: Subject) -> str:
    """Another guest, whose job has its state in a device."""
    run_worker(vm.made, "lab-b")
    try:
        before = worker_job(vm.made)
        moved = vm.do("migrate", WORKER, "lab-a")
        well(vm.made, before)
    finally:
        vm.made.vmckpt("vm", "stop", WORKER, "--force")
        vm.made.vmckpt("vm", "rm", WORKER)
        (vm.made.shared / f"{WORKER}.toml").unlink()
    return downtime(moved)


def adopted_device(vm: Subject) -> str:
    """Another QEMU, which has a USB device of the host as soon as that is plugged in."""
    usb = (
        "-nodefaults -display none -S -device qemu-xhci -device usb-host,vendorid=4660,productid=1"
    )
    with by_hand(vm.made, usb, "usb"):
        vm.do("vm", "adopt", "usb", "--host", "lab-a", *monitors(vm.made, "usb"))
    return ""


def domain_device(vm: Subject) -> str:
    vm.do("device", "list", vm.name)
    return ""


def watch(vm: Subject) -> str:
    assert [row["name"] for row in vm.do("top", "--once")["vms"]] == [vm.name]
    metrics = subprocess.run(
        [*COMMAND, "metrics"], env=vm.made.environment, capture_output=True, text=True, check=True
    ).stdout
    assert f'vmckpt_vm_running{{host="lab-a",vm="{vm.name}"}} 1' in metrics, metrics
    return ""


DO: dict[str, Callable[[Subject], str]] = {
    "migrate": migrate,
    "plan": plan,
    "dirty-rate": dirty_rate,
    "checkpoint": checkpoint,
    "restore": restore,
    "restore-as": restore_as,
    "restore-elsewhere": restore_elsewhere,
    "fork": fork,
    "guard": guard,
    "schedule": schedule,
    "group": group,
    "replicate": replicate,
    "drain": drain,
    "devices": devices,
    "watch": watch,
}


# -- the walk -------------------------------------------------------------------------------------


def points(vm: Subject) -> list[str]:
    return [one["id"] for one in vm.made.ok("checkpoint", "list")["checkpoints"]]


async def booted(made: Machines, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    await control.close()


async def loaded(made: Machines, guest: LabGuest) -> None:
    control = await guest.control(made.lab)
    await load(control)
    await control.close()


def things(made: Machines) -> set[str]:
    """What there is of any VM: its QEMU's, its hosts', what it keeps and shares."""
    found = {f"shared {path.name}" for path in made.shared.iterdir() if not path.is_socket()}
    for host in HOSTS:
        for part in ("state/vms", "state/images", "state/replicas", "libvirt/images"):
            found |= {f"{host}: {path.name}" for path in made.folder(host).glob(f"{part}/*")}
        listed = made.virsh(host, "list", "--all", "--name").split()
        found |= {f"{host}: domain {name}" for name in listed}
    return found


def alone(made: Machines) -> bool:
    """Whether one QEMU runs on all hosts together; those of vmckpt's own VMs have their name."""
    paths = [Path(f"/proc/{process.pid}/comm") for process in find(made.lab.directory)]
    names = [path.read_text() for path in paths if path.exists()]
    return sum(name.startswith(("qemu", "vmckpt-")) for name in names) == 1


@dataclass(slots=True)
class Walk:
    """A lab with one guest in it, for many cells; made again after one that went wrong."""

    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    _lab: ExitStack = field(default_factory=ExitStack)
    _guest: ExitStack = field(default_factory=ExitStack)
    _made: Machines | None = None
    _subject: Subject | None = None

    def subject(self, kind: str) -> Subject:
        """A guest of that kind on lab-a, under load; an adopted one as it was started."""
        if self._made is None:
            self._made = self._lab.enter_context(machines([qemu("10.0")] * 2))
            secure(self._made)
        if self._subject is None or self._subject.kind != kind or not _is_untouched(self._subject):
            self._end_guest()
            guest = self._guest.enter_context(GUESTS[kind](self._made))
            self._subject = Subject(self._made, kind, guest)
            asyncio.run(loaded(self._made, guest))
        return self._subject

    def _end_guest(self) -> None:
        self._guest.close()
        if self._made is not None and self._subject is not None:
            if self._subject.kind != "domain":
                self._made.ok("vm", "stop", self._subject.name, "--force")
                self._made.ok("vm", "rm", self._subject.name)
            for left in self._made.shared.iterdir():
                left.unlink()
            for host in HOSTS:
                self._made.inside(host, "sh", "-c", f"rm -f {IMAGES[0]}/*")
        self._subject = None

    def drop(self) -> None:
        """Nothing of either stays."""
        self._made = self._subject = None
        self._guest.close()
        self._lab.close()


def _is_untouched(vm: Subject) -> bool:
    return vm.kind != "adopted" or (
        vm.made.ok("vm", "show", vm.name)["started_by"] == "another program"
    )


@pytest.fixture(scope="module")
def walk() -> Iterator[Walk]:
    made = Walk()
    yield made
    made.drop()
    if WRITE in os.environ:
        facts = machine()
        text = f"{facts['qemu'].partition('(')[0].strip()}, {facts['cores']} cores"
        write(Results(text, NAMES, made.cells))


@pytest.mark.qemu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "operation"),
    [pytest.param(*one, marks=[] if one in SAMPLE else pytest.mark.long) for one in CELLS],
)
def test_cell(walk: Walk, kind: str, operation: str) -> None:
    try:
        cell = done(walk.subject(kind), operation)
    except BaseException:
        walk.drop()
        raise
    print(kind, operation, cell)
    walk.cells.setdefault(operation, {})[kind] = cell
    assert cell.refused or operation not in REFUSED.get(kind, ()), cell
    if WRITE not in os.environ:
        assert cell.refused == read().cells[operation][kind].refused


def done(vm: Subject, operation: str) -> Cell:
    """Do it; the guest is sound afterwards, in one place, and nothing of it is left."""
    before = things(vm.made)
    try:
        cell = Cell(DO[operation](vm))
    except RefusedError as refused:
        assert operation in REFUSED.get(vm.kind, ()), refused
        # This run's folder has another name in the next one.
        folder, words = str(vm.made.shared), refused.cell.refused or {}
        cell = Cell(refused={k: v.replace(folder, "/shared") for k, v in words.items()})
    vm.is_sound()
    rows = [one for one in vm.made.ok("vm", "list")["vms"]]
    assert [(one["name"], one["host"], one["state"]) for one in rows] == [
        (vm.name, "lab-a", "running")
    ]
    if taken := points(vm):
        vm.do("checkpoint", "rm", *taken, "--yes")
    for name in (f"{STORE}-{vm.kind}", LEASES):
        shutil.rmtree(vm.made.shared / name, ignore_errors=True)
    eventually(lambda: alone(vm.made), 30, "one QEMU")
    assert things(vm.made) == before
    return cell
