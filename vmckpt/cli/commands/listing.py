"""The work of `vmckpt vm list`, independent of the parser.

It does not import typer: a plain `vmckpt vm list` does without (`cli/entry.py`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vmckpt.cli.layout import Layout
from vmckpt.cli.loop import run, warn

if TYPE_CHECKING:
    from vmckpt.drivers.driver import VmInfo


def list_plainly(*, as_json: bool) -> None:
    """List the VMs with every other option as it is when it is not given."""
    list_vms((), Layout(as_json=as_json))


def list_vms(hosts: Sequence[str] | None, layout: Layout) -> None:
    """List the VMs of the hosts of these names; without any, of all. Raises UsageError,
    NotFoundError.
    """
    from vmckpt.cli.tree.names import VMS, remember
    from vmckpt.drivers.find import inspect_everywhere
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.units import format_size

    found = run(inspect_everywhere([find_host(name) for name in hosts] if hosts else None))
    for error in found.silent:
        warn(f"not asked: {error}")
    if not hosts:
        remember(VMS, [vm.name for vm in found.given])
    rows = [
        (
            vm.name,
            vm.host,
            _state(vm),
            str(vm.vcpus),
            format_size(vm.memory_bytes),
            vm.machine,
            "libvirt" if vm.driver == "libvirt" else "vmckpt",
            vm.accel or "-",
            vm.cpu or "-",
            str(vm.pid or "-"),
            " ".join(vm.disks) or "-",
        )
        for vm in found.given
    ]
    usual = ("name", "host", "state", "vcpus", "memory", "machine")
    wide = ("managed by", "accelerator", "cpu", "pid", "disks")
    for one in (one for one in found.arrivals if one.operation is None):
        warn(f"{one.vm} may run on {one.host}: its migration there was interrupted; recover it: "
             f"vmckpt migrate --recover {one.vm}")  # fmt: skip
    unread = {id(one.error): one.vm for one in found.unread}
    silent = [{"what": error.what, "why": error.why, "remedy": error.remedy,
               "vm": unread.get(id(error))} for error in found.silent]  # fmt: skip
    facts = {"vms": [vm.to_json() for vm in found.given], "silent": silent,
             "unanswered": found.unanswered,
             "arrivals": [one._asdict() for one in found.arrivals]}  # fmt: skip
    layout.show(facts, (*usual, *wide), rows, wide=wide)


def _state(vm: "VmInfo") -> str:
    state = f"{vm.state} (QEMU died)" if vm.ended else vm.state
    if vm.operation:
        return f"{state} ({vm.operation})"
    return f"{state} (migration interrupted)" if vm.migration_cut_off else state
