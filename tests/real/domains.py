"""libvirt domains on hosts that look like machines, for tests."""

import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.qemu.world import image
from tests.real.machines import Machines
from tests.waiting import eventually
from vmckpt.hosts.processes.process import ProcessId, find_by_argument
from vmckpt.lab.guests.labguest import HEARTBEATS, LabGuest

GUEST = LabGuest("dom", 7, Path(), memory="192M")
HOSTS = ("lab-a", "lab-b")
OWN_DISK = Path("/var/lib/libvirt/images/dom.qcow2")  # of whichever host has the domain
_DISK = """
<disk type='file' device='disk'><driver name='qemu' type='qcow2' cache='none'/>
<source file='{path}'/><target dev='vda' bus='virtio'/></disk>"""
# What virt-install adds to a guest that somebody is to look at.
SCREEN = """
<graphics type='vnc' port='-1' autoport='yes' listen='127.0.0.1'/>
<video><model type='{card}'/></video><input type='tablet' bus='usb'/>
<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>"""
# What `virt-install --osinfo debian11 --print-xml` (4.1) makes, but for disk, NIC and PCI ports.
VIRT_INSTALL = """
<controller type='usb' model='qemu-xhci' ports='15'/>
<console type='pty'/>
<channel type='unix'><source mode='bind'/>
<target type='virtio' name='org.qemu.guest_agent.0'/></channel>
<channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0'/></channel>
<input type='tablet' bus='usb'/>
<graphics type='spice' port='-1' tlsPort='-1' autoport='yes'><image compression='off'/></graphics>
<sound model='ich9'/><video><model type='virtio'/></video>
<redirdev bus='usb' type='spicevmc'/><redirdev bus='usb' type='spicevmc'/>
<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>"""


class DomainMemory(NamedTuple):
    """XML of a domain's memory and its nodes, and words for its kernel."""

    xml: str = "<memory unit='MiB'>192</memory>"
    nodes: str = ""
    words: str = ""


MEMORY = DomainMemory()
_DOMAIN = """\
<domain type='qemu'><name>{name}</name>{memory}<vcpu>1</vcpu>
<metadata><vmckpt:heartbeats xmlns:vmckpt='urn:vmckpt' id='{number}'/></metadata>
<os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type><kernel>{image}/vmlinuz</kernel>
<initrd>{image}/initrd</initrd>{firmware}<cmdline>console=ttyS0 quiet panic=-1 cryptomgr.notests \
vk.id={number} vk.ip={address}/24 vk.heartbeat={heartbeats}{words}</cmdline></os>
<features><acpi/></features>
<cpu mode='custom' match='exact'><model fallback='forbid'>qemu64</model>{numa}</cpu>
<on_poweroff>destroy</on_poweroff>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>{disk}{devices}
<interface type='bridge'><source bridge='br0'/><model type='virtio'/><rom enabled='no'/></interface>
<serial type='pty'/><memballoon model='{balloon}'/></devices></domain>
"""


def secure(machines: Machines) -> None:
    """Every libvirtd takes orders by TLS, with certificates of vmckpt's."""
    machines.certify()
    pki = "/var/lib/vmckpt/pki"
    settings = (
        f'listen_tls = 1\nkey_file = "{pki}/server-key.pem"\ncert_file = "{pki}/server-cert.pem"\n'
        f'ca_file = "{pki}/ca-cert.pem"\n'
        'log_filters = "2:qemu.qemu_monitor"\n'  # what it and its QEMUs say, for `log`
    )
    for host in HOSTS:
        conf = "/etc/libvirt/libvirtd.conf"
        edit = f"sed -i '/^listen_t/d' {conf}; printf '%s' '{settings}' >>{conf}"
        assert machines.inside(host, "sh", "-c", edit).code == 0
        stop_libvirtd(machines, host)
        start_libvirtd(machines, host)


def stop_libvirtd(machines: Machines, host: str, number: str = "TERM") -> None:
    """End a host's libvirtd; QEMUs live on."""
    machines.inside(host, "pkill", f"-{number}", "-x", "libvirtd")
    lives = ("pgrep", "-x", "libvirtd")
    eventually(lambda: machines.inside(host, *lives).code != 0, 30, "libvirtd to end")


def start_libvirtd(machines: Machines, host: str) -> None:
    """Start it, and wait until it answers."""
    said = machines.inside(host, "libvirtd", "--listen", "--daemon")
    assert said.code == 0, said.stderr
    asked = ("virsh", "--connect", "qemu:///system", "uri")
    eventually(lambda: machines.inside(host, *asked).code == 0, 30, "libvirtd to answer")


def run_domain(
    machines: Machines,
    host: str,
    *,
    disk: Path | None = None,
    disk_xml: str = "",
    devices: str = "",
    firmware: str = "",
    memory: DomainMemory = MEMORY,
    balloon: str = "none",
) -> None:
    """Define and start the guest as a domain, its disk a new image at `disk`, or `disk_xml`.

    `devices`: XML of more devices; `firmware`: of what boots it.
    """
    if disk is not None:
        for each in HOSTS:
            machines.inside(each, "mkdir", "-p", str(disk.parent))
        made = machines.inside(host, "qemu-img", "create", "-q", "-f", "qcow2", str(disk), "64M")
        assert made.code == 0, made.stderr
    xml = machines.shared / "dom.xml"
    xml.write_text(
        _DOMAIN.format(
            name=GUEST.name,
            number=GUEST.number,
            address=GUEST.address,
            heartbeats=HEARTBEATS,
            image=image(),
            disk=disk_xml if disk is None else _DISK.format(path=disk),
            devices=devices,
            firmware=firmware,
            numa=memory.nodes,
            memory=memory.xml,
            words=memory.words,
            balloon=balloon,
        )
    )
    machines.virsh(host, "define", str(xml))
    machines.virsh(host, "start", GUEST.name)


def remove_domain(machines: Machines) -> None:
    """Nothing of it stays, wherever it is."""
    for host in HOSTS:
        if machines.inside(host, "pgrep", "-x", "libvirtd").code:
            start_libvirtd(machines, host)
        for words in (("destroy", GUEST.name), ("undefine", GUEST.name, "--snapshots-metadata")):
            machines.inside(host, "virsh", "--connect", "qemu:///system", *words)
        machines.inside(host, "sh", "-c", "rm -f /var/lib/libvirt/images/* /var/lib/vmckpt/locks/*")
    for path in machines.shared.glob("dom*"):
        path.unlink()


def log(machines: Machines, host: str) -> Path:
    """What a host's libvirtd and its QEMUs say to one another, after `secure`."""
    return machines.folder(host) / "log/libvirt/libvirtd.log"


def qemus(machines: Machines, host: str) -> list[ProcessId]:
    """The QEMUs of the domain that live on a host, whatever its libvirtd knows of them."""
    return on_host(machines, host, find_by_argument(f"-name\0guest={GUEST.name},"))


def libvirtds(machines: Machines, host: str) -> list[ProcessId]:
    """A host's libvirtd."""
    return on_host(machines, host, find_by_argument("libvirtd\0--listen"))


def on_host(machines: Machines, host: str, processes: list[ProcessId]) -> list[ProcessId]:
    """Those of the processes that are a host's."""
    home = _network(machines.lab.host(host).holder.pid)
    return [process for process in processes if _network(process.pid) == home]


def _network(pid: int) -> str:
    """The network namespace of a process; none when it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except FileNotFoundError:
        return ""


def states(machines: Machines) -> dict[str, str]:
    """By libvirt's own word: host -> the domain's state, for the hosts that have it."""
    found = {}
    for host in HOSTS:
        listed = machines.virsh(host, "list", "--all")
        if match := re.search(rf"\s{GUEST.name}\s+(\S.*)$", listed, re.MULTILINE):
            found[host] = match[1].strip()
    return found


def row(machines: Machines) -> dict[str, Any]:
    """The domain in `vm list`; once only."""
    [found] = [vm for vm in machines.ok("vm", "list")["vms"] if vm["name"] == GUEST.name]
    return dict(found)


def await_transfer(machines: Machines, host: str) -> None:
    """Until libvirt's own job on `host` sends memory."""
    deadline = time.monotonic() + 60
    words = ("virsh", "--connect", "qemu:///system", "domjobinfo", GUEST.name)
    while "Memory processed" not in machines.inside(host, *words).stdout:
        assert time.monotonic() < deadline, "no job has begun"
        time.sleep(0.05)
