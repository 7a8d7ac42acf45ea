"""vmckpt snapshot: save, list, load, delete."""

from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.confirm import Yes, confirm
from vmckpt.cli.options.arguments import VmName
from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, run, show

if TYPE_CHECKING:
    from vmckpt.drivers.driver import VmSnapshot

app = typer.Typer(
    help="QEMU's internal snapshots (savevm).\n\nThey are stored in qcow2 images; the VM is "
    "paused while one is taken.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
SnapshotName = Annotated[str, typer.Argument(help="The snapshot's name.")]


@app.command()
def save(vm: VmName, name: SnapshotName, json: Json = False) -> None:
    """Save memory, devices and disks of a running VM."""
    from vmckpt.cli.found import find
    from vmckpt.ui.progress import display

    found = run(find(vm))
    with display(f"saving {vm} as {name}") as emit:
        snapshot = run(found.save(name, emit))
    size = f"{_size(snapshot)} of " if snapshot.state_bytes else ""
    text = f"{name} is saved, {size}memory and devices"
    show({"vm": vm, **snapshot.facts}, text, as_json=json)


@app.command("list")
@together
def list_(vm: VmName, *, listing: ListOptions) -> None:
    """List a VM's snapshots, oldest first."""
    list_snapshots(vm, listing)


def list_snapshots(vm: str, listing: ListOptions) -> None:
    """Print the list."""
    from vmckpt.cli.found import find
    from vmckpt.units import format_time

    found = run(run(find(vm)).snapshots())
    rows = [(one.name, format_time(one.taken_unix_s), _size(one), _clock(one)) for one in found]
    facts = {"vm": vm, "snapshots": [s.facts for s in found]}
    listing.layout().show(facts, ("name", "taken", "memory", "guest clock"), rows)


@app.command()
def load(vm: VmName, name: SnapshotName, yes: Yes = False, json: Json = False) -> None:
    """Return a VM to a snapshot.

    Everything since then is lost.
    """
    from vmckpt.cli.found import find
    from vmckpt.ui.progress import display

    found = run(find(vm))
    confirm(
        f"{vm} goes back to its snapshot {name}.\n"
        "All that its memory and disks got since then is lost.",
        yes=yes,
        as_json=json,
    )
    with display(f"putting {vm} back to {name}") as emit:
        snapshot = run(found.load(name, emit))
    show({"vm": vm, **snapshot.facts}, f"{vm} is back at {name}", as_json=json)


@app.command("delete", hidden=True)
@app.command()
def rm(vm: VmName, name: SnapshotName, yes: Yes = False, json: Json = False) -> None:
    """Delete a snapshot."""
    from vmckpt.cli.found import find
    from vmckpt.ui.progress import display

    found = run(find(vm))
    confirm(f"The snapshot {name} of {vm} is deleted for good.", yes=yes, as_json=json)
    with display(f"deleting {name} of {vm}") as emit:
        run(found.delete(name, emit))
    show({"vm": vm, "name": name, "deleted": True}, f"{name} is deleted", as_json=json)


def _size(snapshot: "VmSnapshot") -> str:
    from vmckpt.units import format_size

    return "-" if snapshot.state_bytes is None else format_size(snapshot.state_bytes)


def _clock(snapshot: "VmSnapshot") -> str:
    from vmckpt.units import format_duration

    return "-" if snapshot.guest_clock_s is None else format_duration(snapshot.guest_clock_s)
