"""Copies and forks of a QEMU that was started by hand: the guest as it was, beside the original."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kinds import VERSIONS
from tests.qemu.test_adopt import BLOCKDEV, HAND, PLAIN, adopt, by_hand
from tests.qemu.test_checkpoint import all_there, console, in_memory, load, sound
from tests.qemu.test_checkpoint_whole import macs
from tests.qemu.test_isolation import SILENT_S, end, observer, sender
from tests.qemu.test_isolation import by_hand as sending_by_hand
from tests.qemu.world import World, qemu, world
from tests.waiting import eventually
from vmckpt.hosts.processes.process import ProcessId, is_alive
from vmckpt.vm.argv import default_mac

UUID = "11111111-2222-4333-8444-555555555555"
AGENT = (
    "-device virtio-serial-pci -chardev socket,id=ga,path=agent.sock,server=on,wait=off "
    "-device virtserialport,chardev=ga,name=org.qemu.guest_agent.0"
)
# As people type it, with what only one machine may have.
TYPED = f"{PLAIN} {AGENT} -uuid {UUID} -smbios type=1,uuid={UUID},product=box"
NODES = f"{BLOCKDEV} {AGENT}"
# The image of this one is raw, below no node for its format.
LOOSE = NODES.replace("root.qcow2", "root.raw").replace(
    '-blockdev {"driver":"qcow2","node-name":"root","file":"f0"} ', ""
).replace('"drive":"root"', '"drive":"f0"')  # fmt: skip

# Based on another image, as libvirt writes it: both QEMUs would write that, if both opened it.
CHAIN = NODES.replace(
    '-blockdev {"driver":"qcow2","node-name":"root","file":"f0"} ',
    "-blockdev driver=file,node-name=f1,filename=extra.qcow2 "
    "-blockdev driver=qcow2,node-name=base,file=f1 "
    '-blockdev {"driver":"qcow2","node-name":"root","file":"f0","backing":"base"} ',
)
LONG = pytest.mark.long


def has_run_on(made: World, *names: str) -> None:
    """Each guest finds its memory and its disk as they were, and goes on."""
    before = {name: console(made, name).count("VK tick=") for name in names}

    def all_ticked() -> bool:
        return all(console(made, name).count("VK tick=") > before[name] + 2 for name in names)

    eventually(all_ticked, 60, "they tick")
    for name in names:
        last = [line for line in console(made, name).splitlines() if "VK tick=" in line][-1]
        assert "mem_errors=0 disk_errors=0" in last, (name, last)


def words(made: World, name: str) -> list[str]:
    (pid,) = made.pids(name)
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def started(made: World, style: str) -> Iterator[ProcessId]:
    with (made.state_dir / "root.raw").open("wb") as file:
        file.truncate(64 << 20)
    with by_hand(made, style, monitors=3) as process:
        yield process


def copied_and_forked(made: World) -> None:
    """Its checkpoint `point` becomes a copy, and it has two forks; all of them run."""
    copied = made.ok("checkpoint", "restore", "point", "--as", "copy")
    assert copied["warnings"] == []
    forked = made.ok("fork", "hand", "--count", "2", "--name", "f")["forks"]
    assert [(one["error"], one["warnings"]) for one in forked] == [("", [])] * 2
    has_run_on(made, "copy", "f-1", "f-2")


async def under_load(made: World) -> None:
    control = await HAND.control(made.lab)
    await load(control)
    await control.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "style",
    [
        pytest.param(TYPED, id="typed", marks=pytest.mark.long),
        pytest.param(CHAIN, id="a chain of images"),
        pytest.param(NODES, id="nodes", marks=LONG),
        pytest.param(LOOSE, id="loose", marks=LONG),
    ],
)
def test_copies_and_forks_run_beside_the_original(style: str) -> None:
    with world(qemu("10.0")) as made, started(made, style) as process:
        adopt(made)
        assert made.ok("vm", "show", "hand")["cannot"] == []
        asyncio.run(under_load(made))
        made.ok("checkpoint", "create", "hand", "--name", "point")
        copied_and_forked(made)
        # The original is as someone started it, and has lost nothing.
        assert is_alive(process)
        asyncio.run(sound(made, HAND))
        memory = {path for name in ("f-1", "f-2") for path in in_memory(made, name)}
        assert [path.stat().st_nlink for path in memory] == [2, 2]
        for name in ("copy", "f-1", "f-2"):
            assert default_mac(name, 0) in asyncio.run(macs(made, name))
            assert default_mac(name, 0) in " ".join(words(made, name))
            assert UUID not in " ".join(words(made, name))
            opened = made.ok("vm", "show", name)["disks"]
            assert [Path(path).parent.name for path in opened] == ["images"]
        # They are VMs like any: they have checkpoints, and start from their own disks.
        made.ok("checkpoint", "create", "f-1", "--name", "of-a-fork")
        made.ok("checkpoint", "restore", "of-a-fork", "--in-place")
        has_run_on(made, "f-1")
        for name in ("copy", "f-1"):
            asyncio.run(all_there(made, name))
            made.ok("vm", "stop", name, "--force")
            made.ok("vm", "start", name)
        for name in ("copy", "f-1", "f-2"):
            made.ok("vm", "stop", name, "--force")
            made.ok("vm", "rm", name, "--disks")
        assert is_alive(process)
        asyncio.run(sound(made, HAND))
        made.ok("checkpoint", "restore", "point", "--in-place")
        asyncio.run(sound(made, HAND))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_saved_as_a_whole_becomes_a_copy_which_is_forked(version: str) -> None:
    with world(qemu(version)) as made, by_hand(made, NODES, monitors=2):
        adopt(made)
        asyncio.run(under_load(made))
        made.ok("checkpoint", "create", "hand", "--kind", "file", "--name", "whole")
        made.ok("checkpoint", "restore", "whole", "--as", "copy")
        has_run_on(made, "copy")
        # Its memory is in a file of vmckpt's, so QEMU need not say where it is.
        forked = made.ok("fork", "copy", "--count", "2", "--name", "f")["forks"]
        assert [one["error"] for one in forked] == ["", ""]
        has_run_on(made, "copy", "f-1", "f-2")
        asyncio.run(sound(made, HAND))


@pytest.mark.timeout(300)
def test_they_send_nothing_unless_it_is_asked_for_and_share_no_port_of_the_host() -> None:
    with world(qemu("10.0")) as made, observer() as outside:
        made.ok("host", "set", "local", "--qemu", str(qemu("10.0")))
        machine = sender(outside.port)
        port = free_port()
        machine[machine.index("user,id=n0")] += f",hostfwd=tcp:127.0.0.1:{port}-:22"
        with sending_by_hand(made, "10.0", machine):
            sockets = [word for n in (0, 1) for word in ("--qmp", f"{made.state_dir}/hand{n}.sock")]
            made.ok("vm", "adopt", "hand", "--host", "local", *sockets)
            assert outside.hears()
            made.ok("checkpoint", "create", "hand", "--kind", "file", "--name", "whole")
            assert len(outside.senders(SILENT_S)) == 1
            made.ok("checkpoint", "restore", "whole", "--as", "copy")
            made.ok("checkpoint", "create", "copy", "--name", "point")
            made.ok("fork", "point", "--count", "2", "--name", "f")
            assert all(len(made.qemus(name)) == 1 for name in ("copy", "f-1", "f-2"))
            assert len(outside.senders(SILENT_S * 2)) == 1
            for name in ("copy", "f-1", "f-2"):
                end(made, name)
            plugged = ("--as", "loud", "--network", "plugged")
            refused = made.vmckpt("checkpoint", "restore", "whole", *plugged)
            assert (refused.code, "hostfwd" in refused.error["why"]) == (4, True)
            # What the copy is, stays without the host's port when it is connected.
            made.ok("vm", "network", "copy", "plugged")
            made.ok("vm", "start", "copy")
            eventually(lambda: len(outside.senders(1.0)) == 2, 60, "both are heard")
            assert "hostfwd" not in " ".join(words(made, "copy"))
            end(made, "copy")
            # The VM itself has it, once its QEMU has given it up.
            back = ("checkpoint", "restore", "whole", "--in-place", "--yes")
            refused = made.vmckpt(*back)
            assert (refused.code, f"forwards {port}" in refused.error["why"]) == (4, True)
            assert "vmckpt vm stop hand" in refused.error["remedy"]
            assert outside.hears()
            made.ok("vm", "stop", "hand", "--force")
            made.ok(*back)
            assert f"hostfwd=tcp:127.0.0.1:{port}-:22" in " ".join(words(made, "hand"))
            end(made, "hand")
