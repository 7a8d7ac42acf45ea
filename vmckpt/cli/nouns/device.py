"""vmckpt device: list, cards, recover, hook."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.options.arguments import VmName
from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, run, show
from vmckpt.devices.bundle import Vendor

if TYPE_CHECKING:
    from vmckpt.devices.status import DeviceRow
    from vmckpt.vm.inventory import Vm
    from vmckpt.vm.passthrough.cards import Card

app = typer.Typer(
    help="Passed-through devices and their hooks.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
@together
def list_(vm: VmName, *, listing: ListOptions) -> None:
    """Show a VM's passed-through devices.

    With their strategies, and whether they are plugged in.
    """
    from vmckpt.cli.found import find_own
    from vmckpt.devices.status import device_rows

    found: list[DeviceRow] = run(device_rows(run(find_own(vm, "devices"))))
    rows = [
        (one.id, one.what, one.strategy, one.hook or "-", one.state, " ".join(one.addresses))
        for one in found
    ]
    header = ("device", "what", "strategy", "hook", "state", "host's functions")
    facts = {"vm": vm, "devices": [one._asdict() for one in found]}
    listing.layout().show(facts, header, rows, none=f"{vm} has no passed-through devices")


@app.command()
@together
def cards(
    host: Annotated[str, typer.Argument(help="The host.")],
    match: Annotated[
        str | None,
        typer.Option(
            help="Only cards that match VENDOR:DEVICE, as in a spec.", metavar="VENDOR:DEVICE"
        ),
    ] = None,
    *,
    listing: ListOptions,
) -> None:
    """Show a host's PCI devices and their availability."""
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.vm.passthrough.cards import states

    found: list[tuple[Card, str]] = run(states(find_host(host)))
    found = [(card, why) for card, why in found if match in (None, card.name)]
    rows = [(card.addresses[0], card.name, str(len(card.functions)), why) for card, why in found]
    facts = [
        {"functions": list(card.addresses), "name": card.name, "free": why == "free", "state": why}
        for card, why in found
    ]
    header = ("address", "vendor:device", "functions", "state")
    listing.layout().show({"host": host, "cards": facts}, header, rows)


@app.command()
def recover(vm: VmName, json: Json = False) -> None:
    """Plug in missing devices and restore their jobs.

    For use after "jobs ... were not resumed", when the cause is fixed.
    """
    from vmckpt.cli.found import find_own
    from vmckpt.devices.absence import recover_now

    found: Vm = run(find_own(vm, "devices"))
    run(recover_now(found))
    show({"vm": vm}, f"the devices of {vm} are plugged in, and their jobs continue", as_json=json)


@app.command()
def hook(vendor: Annotated[Vendor, typer.Argument(help="Vendor of the hook.")]) -> None:
    """Print a hook, a program to install in guests."""
    from vmckpt.devices.bundle import hook_file
    from vmckpt.errors import UsageError

    made = hook_file(vendor)
    if sys.stdout.isatty() and not made.isascii():
        raise UsageError(
            f"the {vendor} hook cannot be shown on a terminal",
            why="it is a program in one packed file",
            remedy=f"write it to a file: vmckpt device hook {vendor} > {vendor}",
        )
    sys.stdout.flush()
    sys.stdout.buffer.write(made)
