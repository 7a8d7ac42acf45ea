"""vmckpt lab: up, status, down, demo."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vmckpt.cli.output import Json, run, show

app = typer.Typer(
    help="Small QEMU hosts on this machine, to try things on.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def up(
    hosts: Annotated[int, typer.Option(help="How many hosts.", min=1, max=16)] = 2,
    qemu: Annotated[
        list[Path] | None, typer.Option(help="QEMU of the first, second, ... host (repeatable).")
    ] = None,
    json: Json = False,
) -> None:
    """Make a lab: hosts lab-a, lab-b, ... with a network between their guests and this machine."""
    from vmckpt.hosts.inventory import state_dir
    from vmckpt.lab.lab import up as lab_up

    lab = run(lab_up(state_dir(), hosts=hosts, qemus=qemu or [_installed_qemu()]))
    names = [host.name for host in lab.hosts]
    show({"hosts": names}, f"the lab is up: {', '.join(names)}", as_json=json)


@app.command()
def status(json: Json = False) -> None:
    """Show the lab."""
    from vmckpt.hosts.inventory import state_dir
    from vmckpt.lab.state import read
    from vmckpt.ui.tables import table

    lab = read(state_dir())
    hosts: list[dict[str, Any]] = [
        {
            "name": h.name,
            "address": h.migration_address,
            "qemu": str(h.qemu),
            "state_dir": str(h.state_dir),
        }
        for h in (lab.hosts if lab else ())
    ]
    rows = [tuple(host.values()) for host in hosts]
    text = table(("host", "address", "qemu", "state directory"), rows) if lab else "there is no lab"
    show({"up": lab is not None, "hosts": hosts}, text, as_json=json)


@app.command()
def down(json: Json = False) -> None:
    """Remove the lab and everything in it, VMs included."""
    from dataclasses import asdict

    from vmckpt.hosts.inventory import state_dir
    from vmckpt.lab.lab import down as lab_down

    removed = asdict(run(lab_down(state_dir())))
    text = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in removed.items())
    show(removed, f"removed: {text}", as_json=json)


@app.command()
def demo(
    image: Annotated[Path, typer.Option(help="The guest image: `python3 images/build.py`.")],
    qemu: Annotated[Path | None, typer.Option(help="The QEMU to use.")] = None,
) -> None:
    """Show it: a lab, a guest under load, a live migration there and back, and what it cost."""
    from vmckpt.cli.demo import demo as run_demo

    run_demo(image, qemu or _installed_qemu())


def _installed_qemu() -> Path:
    import shutil

    from vmckpt.errors import RefusedError

    found = shutil.which("qemu-system-x86_64")
    if found is None:
        raise RefusedError(
            "there is no QEMU on this machine",
            why="qemu-system-x86_64 is not in PATH",
            remedy="apt-get install qemu-system-x86 qemu-utils, or name one with --qemu",
        )
    return Path(found)
