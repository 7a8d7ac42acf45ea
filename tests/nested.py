"""A machine, emulated, in which vmckpt runs VMs of its own: started here, and the hosts in it.

What runs in it tells facts, a line `FACT {JSON}` each; `images/nested.py` makes its disk.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from images import nested
from tests.qemu.world import World, image, qemu
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.lab.state import Lab, LabHost

HERE = Path(__file__).parents[1]
OURS = ("vmckpt", "tests", "images", "pyproject.toml")
STATE = Path("/var/lib/vk")
HOSTS = ("lab-a", "lab-b")
# A guest of a guest's, without KVM in either: what takes a second elsewhere takes a minute here.
SLOWNESS, LIMIT_S = 20.0, 3000
_FACT, _DONE = "FACT ", "MACHINE-DONE"
_INIT = """\
#!/bin/sh
export PATH=/usr/sbin:/usr/bin HOME=/root LC_ALL=C.UTF-8
mount -t tmpfs run /run
mkdir /dev/shm
mount -t tmpfs shm /dev/shm
ip link set lo up
{setup}
cd {here}
VMCKPT_TEST_IMAGE={image} VMCKPT_TEST_QEMU_10_0={qemu} {python} -m {module}
echo {done} $?
sync
echo o > /proc/sysrq-trigger
while :; do :; done
"""
_MACHINE = (
    *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
    *("-machine", "q35", "-accel", "tcg", "-m", "2G"),
)


def facts(
    directory: Path,
    module: str,
    *argv: str,
    wanted: tuple[str, ...],
    setup: str = ":",
    cmdline: str = "",
    kernel: Path | None = None,
) -> list[dict[str, Any]]:
    """What `module` tells as the machine's only program; fails unless that is what is `wanted`,
    in this order, and it comes to its end.

    `argv` is what the machine has besides, `setup` is run first; `kernel` as for `nested.make`.
    """
    init = _INIT.format(
        setup=setup,
        here=HERE,
        image=image(),
        qemu=qemu("10.0"),
        python=f"{sys.prefix}/bin/python",
        module=module,
        done=_DONE,
    )
    trees = [HERE / name for name in OURS] + [qemu("10.0").parents[1]]
    nested.make(directory, image(), trees, init, kernel)
    try:
        boot = ("-append", f"console=ttyS0 quiet panic=-1 cryptomgr.notests {cmdline}")
        told = list(_told(directory, (*argv, *boot)))
    finally:
        (directory / "disk").unlink()
    assert tuple(fact["what"] for fact in told) == wanted
    return told


def _told(directory: Path, more: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    console = directory / "console"
    drive = f"file={directory}/disk,format=raw,if=virtio"
    boot = ["-kernel", str(directory / "vmlinuz"), "-initrd", str(directory / "initrd")]
    argv = [str(qemu("10.0")), *_MACHINE, *more, *boot]
    argv += ["-drive", drive, "-serial", f"file:{console}"]
    machine = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    deadline, told = time.monotonic() + LIMIT_S, 0
    try:
        while machine.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            for line in _whole_lines(console)[told:]:
                told += 1
                if line.startswith(_FACT):
                    print(f"  {line}", flush=True)
                    yield json.loads(line.removeprefix(_FACT))
    finally:
        machine.kill()
        machine.wait()
    lines = _whole_lines(console)
    assert f"{_DONE} 0" in lines, "\n".join(lines[-60:])


def _whole_lines(console: Path) -> list[str]:
    text = console.read_text(errors="replace") if console.exists() else ""
    return text.replace("\r", "").split("\n")[:-1]


def tell(what: str, **more: Any) -> None:
    """In the machine: a fact."""
    print(_FACT + json.dumps({"what": what, **more}), flush=True)


def hosts() -> World:
    """In the machine: two hosts, each with a state directory; no network between them."""
    (STATE / "hosts").mkdir(parents=True)
    os.environ["VMCKPT_STATE_DIR"] = str(STATE)
    nobody, found = ProcessId(1, 1), []
    for name in HOSTS:
        entry = {"kind": "local", "state_dir": str(STATE / name), "qemu": str(qemu("10.0"))}
        entry["migration_address"] = "127.0.0.1"
        (STATE / f"hosts/{name}.json").write_text(json.dumps(entry))
        here = ("127.0.0.1", qemu("10.0"), "127.0.0.1")
        found.append(LabHost(name, nobody, (), STATE / name, *here))
    lab = Lab(STATE, False, nobody, (), nobody, STATE / "none", tuple(found))
    return World(STATE, lab)
