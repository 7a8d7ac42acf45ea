"""vmckpt vm: run, adopt, list, show, console, start, pause, resume, reboot, stop, rm."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.confirm import Yes, confirm
from vmckpt.cli.nouns.vm import specs
from vmckpt.cli.options.arguments import HostOption, MaybeVmName, SpecFile, VmName
from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, run, show, warn
from vmckpt.cli.results import facts_of
from vmckpt.errors import UsageError
from vmckpt.ui.shown import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vmckpt.drivers.driver import Driver, Started

app = typer.Typer(help="Virtual machines.", no_args_is_help=True, rich_markup_mode=None)

ShutdownLimit = Annotated[
    str,
    typer.Option("--timeout", help="Time limit for the guest's shutdown.", metavar="DURATION"),
]


@app.command("run")
def run_(
    spec: SpecFile,
    host: HostOption = "local",
    silent_hosts_are_off: Annotated[
        bool,
        typer.Option(
            "--silent-hosts-are-off",
            help="Run it although hosts that do not answer may have it: they are certainly off.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Create a VM from a spec and start it."""
    from vmckpt.drivers.direct import started
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.vm.create import read_spec, run_vm

    vm = run(run_vm(read_spec(spec), find_host(host), silent_are_off=silent_hosts_are_off))
    _show_started(vm.name, vm.host.name, started(vm), as_json=json)


@app.command()
def adopt(
    name: VmName,
    qmp: Annotated[
        list[Path],
        typer.Option(
            help="QMP socket of the QEMU; up to three: for operations, for status, for rescues.",
            metavar="SOCKET",
        ),
    ],
    host: HostOption = "local",
    pid: Annotated[
        int | None, typer.Option(help="Process id, if it cannot be determined.", metavar="PID")
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Open the files in its command line, even if another user started it."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Make a running QEMU a VM, without changing its process."""
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.vm.adopted.adopt import adopt as adopt_

    paths = [path.absolute() for path in qmp]
    adoption = run(adopt_(name, find_host(host), paths, pid, trust=trust))
    vm = adoption.vm
    facts = {"vm": name, "host": vm.host.name, "pid": vm.qemu.process.pid, "adopted": True,
             "notes": adoption.notes}  # fmt: skip
    told = "".join(f"\n  note: {one_line(note)}" for note in adoption.notes)
    show(facts, f"{name} is adopted on {vm.host.name} (pid {vm.qemu.process.pid}){told}",
         as_json=json)  # fmt: skip


app.command()(specs.define)
app.command()(specs.edit)
app.command("import")(specs.import_)
app.command()(specs.export)


@app.command("list")
@together
def list_(
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Ask only this host (repeatable).", metavar="HOST"),
    ] = None,
    *,
    listing: ListOptions,
) -> None:
    """List the VMs of all hosts."""
    from vmckpt.cli.commands.listing import list_vms

    list_vms(host, listing.layout())


@app.command("show")
def show_(name: VmName, json: Json = False) -> None:
    """Show a VM: its host, state and current operation."""
    from vmckpt.cli.found import find
    from vmckpt.ui.tables import fields, in_words, without_empty

    facts = run(run(find(name)).inspect()).to_json()
    # These are shown only if true.
    news = {name: facts.get(name) or None for name in ("adopted", "migration_cut_off")}
    show(facts, fields(without_empty(in_words(facts | news))), as_json=json)


@app.command()
def console(name: VmName) -> None:
    """Attach to the VM's serial console; Ctrl-] detaches."""
    from vmckpt.cli.found import find
    from vmckpt.cli.terminal import attach

    vm = run(find(name))
    run(attach(vm.host, run(vm.console())))


@app.command()
def start(
    name: MaybeVmName = None,
    autostart: Annotated[
        bool, typer.Option("--autostart", help="All VMs that start with this machine.")
    ] = False,
    retry: Annotated[
        str | None,
        typer.Option(
            "--retry",
            help="With --autostart: try those again for this long that cannot be started yet.",
            metavar="DURATION",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Start a VM that is off, or resume one that is paused.

    Exit code 1 if --autostart could not start some.
    """
    if autostart == (name is not None):
        raise UsageError(
            "name a VM, or say --autostart",
            why="both were given" if autostart else "neither was given",
            remedy="vmckpt vm start web",
        )
    if retry is not None and not autostart:
        raise UsageError(
            "--retry has no effect here",
            why="it applies to --autostart only",
            remedy="leave it out, or say --autostart",
        )
    if name is None:
        _start_all(retry, as_json=json)
        return
    from vmckpt.cli.found import find

    vm = run(find(name))
    _show_started(name, vm.host.name, run(vm.start()), as_json=json)


def _start_all(retry: str | None, *, as_json: bool) -> None:
    from vmckpt.fleet.autostart import autostart
    from vmckpt.units import parse_duration_s

    found = run(autostart(warn, retry_s=parse_duration_s(retry) if retry else 0.0))
    rows = [{"vm": one.vm, "error": one.error and facts_of(one.error)} for one in found]
    lines = [
        f"{one.vm} runs" if one.error is None else f"{one.vm} is off: {one_line(str(one.error))}"
        for one in found
    ]
    show({"vms": rows}, "\n".join(lines) or "no VM of this machine had to be started",
         as_json=as_json)  # fmt: skip
    if any(one.error for one in found):
        raise typer.Exit(1)


@app.command()
def pause(name: VmName, json: Json = False) -> None:
    """Pause the VM's guest; `vm resume` continues it."""
    from vmckpt.cli.found import find

    vm = run(find(name))
    run(vm.pause())
    facts = {"vm": name, "host": vm.host.name, "state": "paused"}
    show(facts, f"{name} is paused on {vm.host.name}", as_json=json)


@app.command()
def resume(name: VmName, json: Json = False) -> None:
    """Resume a VM that is paused."""
    from vmckpt.cli.found import find

    vm = run(find(name))
    run(vm.resume())
    facts = {"vm": name, "host": vm.host.name, "state": "running"}
    show(facts, f"{name} runs on {vm.host.name}", as_json=json)


@app.command()
def reboot(
    name: VmName,
    force: Annotated[
        bool, typer.Option("--force", help="Reset it immediately, without a shutdown.")
    ] = False,
    timeout: ShutdownLimit = "60s",
    json: Json = False,
) -> None:
    """Shut the guest down and start the VM again."""
    from vmckpt.cli.found import find
    from vmckpt.units import parse_duration_s

    vm = run(find(name))
    run(vm.reboot(force=force, timeout_s=parse_duration_s(timeout)))
    facts = {"vm": name, "host": vm.host.name, "state": "running", "reset": force}
    done = "was reset" if force else "was shut down and started again"
    show(facts, f"{name} {done} on {vm.host.name}", as_json=json)


class Autostart(StrEnum):
    """Whether a VM starts with its host."""

    on = "on"
    off = "off"


@app.command()
def autostart(
    name: VmName,
    setting: Annotated[Autostart, typer.Argument(help="on or off.")],
    json: Json = False,
) -> None:
    """Choose whether a VM starts when its host has booted.

    The setting goes with the VM when it migrates. The unit vmckpt-autostart does it.
    """
    from vmckpt.cli.found import find_own
    from vmckpt.vm.lifecycle import set_autostart

    vm = run(find_own(name, "autostart"))
    is_on = setting is Autostart.on
    run(set_autostart(vm, on=is_on))
    facts = {"vm": name, "host": vm.host.name, "autostart": is_on}
    starts = "starts" if is_on else "does not start"
    show(facts, f"{name} {starts} with its host", as_json=json)


class NicConnection(StrEnum):
    """Whether a VM's NICs are connected."""

    plugged = "plugged"
    isolated = "isolated"


@app.command()
def network(
    name: VmName,
    connection: Annotated[
        NicConnection, typer.Argument(help="plugged or isolated, from the VM's next start.")
    ],
    json: Json = False,
) -> None:
    """Connect or isolate the NICs of a VM that is off.

    Copies and forks are isolated by default.
    """
    from vmckpt.cli.found import find_own
    from vmckpt.vm.lifecycle import set_network

    vm = run(find_own(name, "network"))
    run(set_network(vm, plugged=connection is NicConnection.plugged))
    facts = {"vm": name, "host": vm.host.name, "network": connection.value}
    show(facts, f"{name} is {connection.value} when it next starts", as_json=json)


@app.command()
def stop(
    name: VmName,
    force: Annotated[
        bool, typer.Option("--force", help="End it immediately, like a power cut.")
    ] = False,
    timeout: ShutdownLimit = "60s",
    host: Annotated[
        str | None,
        typer.Option(
            "--host", help="Stop it on this host, although another host has it too.", metavar="HOST"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Press the VM's power button and wait until it is off."""
    from vmckpt.cli.found import find
    from vmckpt.drivers.find import find_on
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.units import parse_duration_s

    vm = run(find(name) if host is None else find_on(find_host(host), name))
    run(vm.stop(force=force, timeout_s=parse_duration_s(timeout)))
    show({"vm": name, "host": vm.host.name, "state": "stopped"}, f"{name} is stopped", as_json=json)


@app.command()
def rm(
    name: VmName,
    disks: Annotated[
        bool,
        typer.Option(
            "--disks", help="Also remove its disk images, unless something else uses them."
        ),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            help="Remove it from this host, although another host has it too.",
            metavar="HOST",
        ),
    ] = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove a VM that is off.

    Its disk images stay. An adopted QEMU keeps running.
    """
    from vmckpt.drivers.driver import remove_with_disks

    vm = _to_remove(name, host, disks=disks)
    if disks:
        confirm(_loss(name, vm.own_images()), yes=yes, as_json=json)
    stay, pid, tpm, removed, kept = run(remove_with_disks(vm) if disks else vm.remove())
    for path, why in kept.items():
        warn(f"{path} stays: {why}")
    left = f"; its disks stay: {', '.join(stay)}" if stay else ""
    left += f"; what its TPM holds stays: {tpm} on {vm.host.name}" if tpm else ""
    gone = f", with {', '.join(removed)}" if removed else ""
    done = "is removed" if pid is None else f"is forgotten; its QEMU (pid {pid}) keeps running"
    facts = {"vm": name, "removed": True, "disks": stay, "removed_disks": list(removed),
             "kept_disks": dict(kept), "goes_on_as_pid": pid, "kept_tpm": tpm}  # fmt: skip
    show(facts, f"{name} {done}{gone}{left}", as_json=json)


def _to_remove(name: str, host: str | None, *, disks: bool) -> "Driver":
    from vmckpt.cli.found import find
    from vmckpt.drivers.direct import DirectVm
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.vm.inventory import require_at_home

    if host is None:
        return run(find(name))
    if disks:
        raise UsageError(
            "--disks does not go with --host",
            why="another host may have the VM too, and use the same disks",
            remedy="leave out one of them",
        )
    return DirectVm(run(require_at_home(find_host(host), name)))


def _loss(name: str, paths: "Sequence[Path]") -> str:
    return f"'{name}' is removed for good, with its disks: {', '.join(map(str, paths)) or 'none'}."


def _show_started(name: str, host: str, started: "Started", *, as_json: bool) -> None:
    cpu = "by libvirt" if started.pid is None else f"CPU {started.cpu}"
    facts = {"vm": name, "host": host, "state": "running", **started._asdict()}
    text = f"{name} runs on {host} ({started.machine}, {started.accel}, {cpu})"
    show(facts, text, as_json=as_json)
