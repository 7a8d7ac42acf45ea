"""vmckpt snapshot: save, list, load, delete."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.output import Json, run, show
from vmckpt.cli.vm import Name

if TYPE_CHECKING:
    from vmckpt.qemu.replies import Snapshot

app = typer.Typer(
    help="QEMU's internal snapshots on qcow2 (savevm): the VM is stopped while one is taken.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
SnapshotName = Annotated[str, typer.Argument(help="The snapshot's name.")]


@app.command()
def save(vm: Name, name: SnapshotName, json: Json = False) -> None:
    """Save memory, devices and disks of a running VM."""
    from vmckpt.checkpoint import savevm
    from vmckpt.cli.vm import settled
    from vmckpt.hosts.inventory import check_name
    from vmckpt.ui.progress import display
    from vmckpt.units import format_size

    found = run(settled(vm))
    with display(f"saving {vm} as {name}") as emit:
        snapshot = run(savevm.save(found, check_name(name, "snapshot"), emit))
    text = f"{name} is saved, {format_size(snapshot.state_bytes)} of memory and devices"
    show({"vm": vm, **_facts(snapshot)}, text, as_json=json)


@app.command("list")
def list_(vm: Name, json: Json = False) -> None:
    """List a VM's snapshots, oldest first."""
    from vmckpt.checkpoint import savevm
    from vmckpt.cli.vm import settled
    from vmckpt.ui.tables import table
    from vmckpt.units import format_duration, format_size

    found = run(savevm.list_all(run(settled(vm))))
    rows = [
        (s.name, f"{datetime.fromtimestamp(s.taken_unix_s, UTC).astimezone():%Y-%m-%d %H:%M:%S}",
         format_size(s.state_bytes), format_duration(s.guest_clock_s))
        for s in found
    ]  # fmt: skip
    text = table(("name", "taken", "memory", "guest clock"), rows)
    show({"vm": vm, "snapshots": [_facts(s) for s in found]}, text, as_json=json)


@app.command()
def load(vm: Name, name: SnapshotName, json: Json = False) -> None:
    """Put a VM back to a snapshot; what came since is gone."""
    from vmckpt.checkpoint import savevm
    from vmckpt.cli.vm import settled
    from vmckpt.ui.progress import display

    found = run(settled(vm))
    with display(f"putting {vm} back to {name}") as emit:
        snapshot = run(savevm.load(found, name, emit))
    show({"vm": vm, **_facts(snapshot)}, f"{vm} is back at {name}", as_json=json)


@app.command()
def delete(vm: Name, name: SnapshotName, json: Json = False) -> None:
    """Delete a snapshot."""
    from vmckpt.checkpoint import savevm
    from vmckpt.cli.vm import settled
    from vmckpt.ui.progress import display

    found = run(settled(vm))
    with display(f"deleting {name} of {vm}") as emit:
        run(savevm.delete(found, name, emit))
    show({"vm": vm, "name": name, "deleted": True}, f"{name} is deleted", as_json=json)


def _facts(snapshot: "Snapshot") -> dict[str, Any]:
    return snapshot._asdict()
