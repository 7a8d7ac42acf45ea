"""vmckpt vm: run, adopt, list, show, console, start, stop, rm."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.output import Json, run, show, warn

if TYPE_CHECKING:
    from vmckpt.vm.inventory import Look, Vm

app = typer.Typer(help="Virtual machines.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="The VM's name.")]
HostOption = Annotated[str, typer.Option("--host", help="The host, see `vmckpt host list`.")]


@app.command("run")
def run_(
    spec: Annotated[Path, typer.Argument(help="The VM's spec (TOML).")],
    host: HostOption = "local",
    json: Json = False,
) -> None:
    """Create a VM from a spec and start it."""
    from vmckpt.hosts.inventory import find_host
    from vmckpt.vm.lifecycle import read_spec, run_vm

    vm = run(run_vm(read_spec(spec), find_host(host)))
    _show_started(vm, as_json=json)


@app.command()
def adopt(
    name: Name,
    qmp: Annotated[
        list[Path],
        typer.Option(help="A QMP socket of the QEMU; up to three: to work, to look, for a rescue."),
    ],
    host: HostOption = "local",
    pid: Annotated[int | None, typer.Option(help="Its process, where that is in doubt.")] = None,
    json: Json = False,
) -> None:
    """Make a QEMU that somebody else started a VM; nothing about its process changes."""
    from vmckpt.hosts.inventory import find_host
    from vmckpt.vm.adopted.adopt import adopt as adopt_

    paths = [path.absolute() for path in qmp]
    adoption = run(adopt_(name, find_host(host), paths, pid))
    vm = adoption.vm
    facts = {"vm": name, "host": vm.host.name, "pid": vm.qemu.process.pid, "adopted": True,
             "notes": adoption.notes}  # fmt: skip
    told = "".join(f"\n  note: {note}" for note in adoption.notes)
    show(facts, f"{name} is adopted on {vm.host.name} (pid {vm.qemu.process.pid}){told}",
         as_json=json)  # fmt: skip


@app.command("list")
def list_(json: Json = False) -> None:
    """List the VMs of all hosts."""
    from vmckpt.hosts.inventory import all_hosts
    from vmckpt.ui.tables import table
    from vmckpt.units import format_size
    from vmckpt.vm.inventory import look_all

    found = run(look_all(all_hosts()))
    for error in found.silent:
        warn(f"not asked: {error}")
    looks = sorted(found.given, key=lambda look: (look.vm.name, look.vm.host.name))
    rows = [
        (look.vm.name, look.vm.host.name, _state(look), str(look.vm.spec.vcpus),
         format_size(look.vm.spec.memory_bytes), look.vm.qemu.platform.machine)
        for look in looks
    ]  # fmt: skip
    text = table(("name", "host", "state", "vcpus", "memory", "machine"), rows)
    silent = [{"what": error.what, "why": error.why, "remedy": error.remedy}
              for error in found.silent]  # fmt: skip
    show({"vms": [_facts(look) for look in looks], "silent": silent}, text, as_json=json)


@app.command("show")
def show_(name: Name, json: Json = False) -> None:
    """Show one VM: where it is, how it is, who works on it."""
    from vmckpt.ui.tables import fields
    from vmckpt.vm.inventory import look

    facts = _facts(run(look(run(settled(name)))))
    text = fields([(key.replace("_", " "), str(value)) for key, value in facts.items()])
    show(facts, text, as_json=json)


@app.command()
def console(name: Name) -> None:
    """Attach to the VM's serial console; Ctrl-] leaves it."""
    from vmckpt.cli.terminal import attach
    from vmckpt.vm.inventory import require_console

    vm = run(settled(name))
    run(require_console(vm))
    run(attach(vm.host, vm.qemu.files.console))


@app.command()
def start(name: Name, json: Json = False) -> None:
    """Start a stopped VM where it is."""
    from vmckpt.vm.lifecycle import start_vm

    _show_started(run(start_vm(run(settled(name)))), as_json=json)


@app.command()
def stop(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="End it at once, like a power cut.")
    ] = False,
    timeout: Annotated[str, typer.Option(help="How long the guest may take.")] = "60s",
    json: Json = False,
) -> None:
    """Press the VM's power button and wait until it is off."""
    from vmckpt.units import parse_duration_s
    from vmckpt.vm.lifecycle import stop_vm

    vm = run(settled(name))
    run(stop_vm(vm, force=force, timeout_s=parse_duration_s(timeout)))
    show({"vm": name, "host": vm.host.name, "state": "stopped"}, f"{name} is stopped", as_json=json)


@app.command()
def rm(name: Name, json: Json = False) -> None:
    """Forget a stopped VM; its disk images stay. An adopted QEMU goes on by itself."""
    from vmckpt.vm.lifecycle import remove_vm

    vm = run(settled(name))
    pid = run(remove_vm(vm))
    disks = [str(disk.on(vm.host.state_dir)) for disk in vm.spec.disks]
    kept = f"; its disks stay: {', '.join(disks)}" if disks else ""
    done = "is removed" if pid is None else f"is forgotten; its QEMU (pid {pid}) goes on as it was"
    facts = {"vm": name, "removed": True, "disks": disks, "goes_on_as_pid": pid}
    show(facts, f"{name} {done}{kept}", as_json=json)


async def settled(name: str) -> "Vm":
    """The VM, after ending what a migration that was cut off left of it."""
    from vmckpt.hosts.inventory import all_hosts
    from vmckpt.migrate.journal import find_journal
    from vmckpt.vm.inventory import find_vm, is_worked_on

    if await find_journal(name, all_hosts()) is None or await is_worked_on(name):
        return await find_vm(name)
    from vmckpt.migrate.recover import recover

    if (recovery := await recover(name, warn)) is not None:
        warn(f"migration {recovery.run} was cut off; {recovery.outcome} ({recovery.host})")
    return await find_vm(name)


def _show_started(vm: "Vm", *, as_json: bool) -> None:
    platform = vm.qemu.platform
    facts = {"vm": vm.name, "host": vm.host.name, "pid": vm.qemu.process.pid, "state": "running",
             "accel": platform.accel, "machine": platform.machine, "cpu": platform.cpu}  # fmt: skip
    what = f"{platform.machine}, {platform.accel}, CPU {platform.cpu}"
    show(facts, f"{vm.name} runs on {vm.host.name} ({what})", as_json=as_json)


def _state(look: "Look") -> str:
    if look.owner:
        return f"{look.state} ({look.owner.action})"
    return f"{look.state} (migration cut off)" if look.migrating else look.state


def _facts(look: "Look") -> dict[str, Any]:
    vm, platform = look.vm, look.vm.qemu.platform
    return {
        "name": vm.name,
        "host": vm.host.name,
        "state": look.state,
        "adopted": vm.spec.adopted is not None,
        "started_by": "somebody else" if vm.qemu.is_foreign else "vmckpt",
        "cannot": [] if vm.ram_is_shared else ["checkpoint", "replicate"],
        "operation": look.owner.action if look.owner else None,
        "migration_cut_off": look.migrating and look.owner is None,
        "vcpus": vm.spec.vcpus,
        "memory_bytes": vm.spec.memory_bytes,
        "machine": platform.machine,
        "accel": platform.accel,
        "cpu": platform.cpu,
        "pid": vm.qemu.process.pid if look.state != "stopped" else None,
        "disks": [str(disk.on(vm.host.state_dir)) for disk in vm.spec.disks],
        "console_log": str(vm.qemu.files.console_log),
        "qmp_socket": str(vm.qemu.files.onlooker),
    }
