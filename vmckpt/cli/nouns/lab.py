"""vmckpt lab: up, status, down, demo."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vmckpt.cli.confirm import Yes, confirm
from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, run, show
from vmckpt.errors import UsageError

app = typer.Typer(
    help="Small QEMU hosts on this machine for testing.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def up(
    hosts: Annotated[int, typer.Option(help="Number of hosts.", min=1, max=16, metavar="N")] = 2,
    qemu: Annotated[
        list[Path] | None,
        typer.Option(help="QEMU of the first, second, ... host (repeatable).", metavar="FILE"),
    ] = None,
    real: Annotated[
        bool,
        typer.Option(
            "--real", help="Make hosts that look like machines, with sshd and libvirtd (as root)."
        ),
    ] = False,
    bare: Annotated[
        bool, typer.Option("--bare", help="With --real: only Debian and sshd on the hosts.")
    ] = False,
    packages: Annotated[
        Path | None,
        typer.Option(help="For --real: directory printed by images/hosts.py.", metavar="DIRECTORY"),
    ] = None,
    json: Json = False,
) -> None:
    """Create a lab.

    Hosts lab-a, lab-b, ... with a network to this machine for their guests.
    """
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.lab.lab import up as lab_up
    from vmckpt.lab.real.build import MachineKit, check_kit, usual_packages
    from vmckpt.lab.state import ssh_config

    if not real and (bare or packages):
        raise UsageError(
            "--bare and --packages are for hosts that look like machines",
            why="--real is missing",
            remedy="add --real, or leave them out",
        )
    if bare and qemu:
        raise UsageError(
            "--bare and --qemu exclude one another",
            why="a bare host has no QEMU",
            remedy="leave one of them out",
        )
    kit = MachineKit(packages or usual_packages(), bare) if real else None
    qemus = qemu or ([] if bare else [_installed_qemu()])
    if kit:
        check_kit(kit)
    run(_require_qemus(qemus))
    lab = run(lab_up(state_dir(), hosts=hosts, qemus=qemus, kit=kit))
    names = [host.name for host in lab.hosts]
    text = f"the lab is up: {', '.join(names)}"
    if real:
        text += f"\nlog in: ssh -F {ssh_config(lab.directory)} {names[0]}"
    show({"hosts": names}, text, as_json=json)


@app.command()
@together
def status(listing: ListOptions) -> None:
    """Show the lab."""
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.lab.state import read, ssh_config

    lab = read(state_dir())
    hosts: list[dict[str, Any]] = [
        {
            "name": h.name,
            "address": h.migration_address,
            "qemu": str(h.qemu),
            "state_dir": str(h.state_dir),
            "ssh_address": h.ssh_address,
        }
        for h in (lab.hosts if lab else ())
    ]
    rows = [tuple(value or "-" for value in host.values()) for host in hosts]
    header = ("host", "address", "qemu", "state directory", "ssh")
    config = str(ssh_config(lab.directory)) if lab and lab.hosts[0].ssh_address else None
    result = {"up": lab is not None, "hosts": hosts, "ssh_config": config}
    wide = ("qemu", "state directory")
    listing.layout().show(result, header, rows, wide=wide, none="there is no lab")


@app.command()
def down(yes: Yes = False, json: Json = False) -> None:
    """Remove the lab with its VMs and their disks."""
    from dataclasses import asdict

    from vmckpt.checkpoint.catalogue.known_stores import forget_of_host
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.lab.lab import down as lab_down
    from vmckpt.lab.state import lab_directory
    from vmckpt.units import counted

    if lab_directory(state_dir()).exists():
        confirm(_all_in_it(lab_directory(state_dir())), yes=yes, as_json=json)
    before = _inventory()
    removed = asdict(run(lab_down(state_dir())))
    for name in before - _inventory():
        forget_of_host(name, below=lab_directory(state_dir()))
    nouns = {"hosts": "host", "processes": "process", "ram_files": "RAM file"}
    text = ", ".join(counted(removed[what], noun) for what, noun in nouns.items())
    show(removed, f"removed: {text}", as_json=json)


def _all_in_it(directory: Path) -> str:
    """What is removed with a lab, read from its directories: an incomplete lab is listed, too."""
    folders = (*directory.glob("lab-*/vms/*"), *directory.glob("lab-*/state/vms/*"))
    found = sorted({path.name for path in folders})
    vms = f"with the VMs {', '.join(found)}, their disks and checkpoints" if found else "with no VM"
    return f"The lab in {directory} is removed for good, {vms}."


@app.command()
def demo(
    image: Annotated[
        Path, typer.Option(help="Guest image (`python3 images/build.py`).", metavar="IMAGE")
    ],
    qemu: Annotated[Path | None, typer.Option(help="QEMU binary.", metavar="FILE")] = None,
) -> None:
    """Run a demonstration.

    Live migration of a guest under load between two lab hosts.
    """
    from vmckpt.cli.demo import demo as run_demo

    run_demo(image, qemu or _installed_qemu())


async def _require_qemus(paths: list[Path]) -> None:
    """Before anything is made. Raises UsageError."""
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.hosts.local import LocalHost
    from vmckpt.vm.probe import require_qemu

    for path in dict.fromkeys(path.absolute() for path in paths):
        await require_qemu(LocalHost("local", state_dir(), "127.0.0.1", qemu=str(path)))


def _installed_qemu() -> Path:
    import shutil

    from vmckpt.errors import RefusedError
    from vmckpt.installing import Need, advice_here

    found = shutil.which("qemu-system-x86_64")
    if found is None:
        raise RefusedError(
            "there is no QEMU on this machine",
            why="qemu-system-x86_64 is not in PATH",
            remedy=f"{advice_here(Need.QEMU)}, or name one with --qemu",
        )
    return Path(found)


def _inventory() -> set[str]:
    """The names of all hosts but this machine."""
    from vmckpt.hosts.inventory.directories import state_dir

    return {path.stem for path in (state_dir() / "hosts").glob("*.json")}
