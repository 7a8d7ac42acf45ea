"""vmckpt checkpoint: create, list, show, diff, verify, rm, prune, restore."""

import re
from enum import StrEnum
from typing import Annotated, Any

import typer

from vmckpt.cli import snapshot
from vmckpt.cli.output import Json, run, show, warn
from vmckpt.cli.which_checkpoint import (
    KeyCommand,
    KeyFile,
    StorePlace,
    catalogue,
    find,
    home,
    key_source,
)

app = typer.Typer(
    help="Points in time of a VM that it can return to, or be forked from.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Vm = Annotated[str, typer.Argument(help="The VM's name.")]
Point = Annotated[str, typer.Argument(help="A checkpoint: its name, or the beginning of its id.")]


class Kind(StrEnum):
    """How a checkpoint is made and kept."""

    epoch = "epoch"
    savevm = "savevm"
    file = "file"


KindOption = Annotated[
    Kind,
    typer.Option(
        "--kind",
        help="epoch: into a store, while it runs; file: into a store, saved as a whole, the VM "
        "stopped for it; savevm: into the qcow2 image, the VM stopped for it.",
    ),
]
OfVm = Annotated[str | None, typer.Option("--vm", help="With --kind savevm: whose it is.")]


@app.command()
def create(
    vm: Vm,
    name: Annotated[str | None, typer.Option("--name", help="What to call it.")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="key=value, any number.")] = None,
    max_pause: Annotated[
        str | None,
        typer.Option("--max-pause", help="How long the guest may stand still: 10ms unless told."),
    ] = None,
    trigger: Annotated[str, typer.Option("--trigger", help="Why it is taken.")] = "operator",
    kind: KindOption = Kind.epoch,
    store: StorePlace = None,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    json: Json = False,
) -> None:
    """Take a checkpoint of a running VM: memory, devices and disks as of one moment."""
    if kind is Kind.savevm:
        snapshot.save(vm, _name(name, vm), json)
        return
    from vmckpt.checkpoint.operate import create as create_
    from vmckpt.checkpoint.take import Wish
    from vmckpt.cli.drivers.find import find_own
    from vmckpt.units import format_size, parse_duration_s

    found = run(find_own(vm))
    # Of one that is saved as a whole nobody else knows what is too long.
    usual_s = 0.0 if kind is Kind.file else 0.010
    allowed_s = parse_duration_s(max_pause) if max_pause else usual_s
    wish = Wish(_name(name, vm), _tags(tag or []), trigger, allowed_s, kind.value)
    result = run(create_(found, store, wish, _tell(json), key_source(key_file, key_command)))
    text = (
        f"{result['name']} is checkpoint {result['id'][:12]} of {vm}: paused "
        f"{result['pause_ms']:.1f} ms, {format_size(result['stored'])} stored, "
        f"{result['took_s']:.2f} s in all"
    )
    if result["apart"]:
        text += f"\nall of it is stored: earlier ones are elsewhere (vmckpt checkpoint list {vm})"
    show({"vm": vm, **result}, text, as_json=json)


@app.command("list")
def list_(
    vm: Annotated[str | None, typer.Argument(help="Only this VM's.")] = None,
    kind: KindOption = Kind.epoch,
    store: StorePlace = None,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    json: Json = False,
) -> None:
    """List checkpoints, each below the one it was taken after."""
    if kind is Kind.savevm:
        snapshot.list_(_whose(vm), json)
        return
    from vmckpt.checkpoint.catalogue import to_json
    from vmckpt.checkpoint.tree import rows
    from vmckpt.ui.tables import table

    found = catalogue(store, key_source(key_file, key_command), vm)
    for error in found.silent:
        warn(f"not listed: {error.what}: {error.why}")
    head = ("checkpoint", "id", "vm", "store", "taken", "added", "pause", "trigger", "tags")
    facts = {
        "checkpoints": [to_json(one) for one in found.entries],
        "silent": [{"what": error.what, "why": error.why} for error in found.silent],
    }
    show(facts, table(head, rows(found.entries)), as_json=json)


@app.command("show")
def show_(
    point: Point,
    store: StorePlace = None,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    json: Json = False,
) -> None:
    """Show all that is known of a checkpoint."""
    from vmckpt.checkpoint.catalogue import to_json
    from vmckpt.checkpoint.tree import lines
    from vmckpt.ui.tables import fields

    found = find(point, store, key_source(key_file, key_command))
    show(to_json(found), fields(lines(found)), as_json=json)


@app.command()
def diff(
    one: Point,
    other: Point,
    store: StorePlace = None,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    json: Json = False,
) -> None:
    """Show how much of memory and disks differs between two checkpoints of one store."""
    from vmckpt.checkpoint.look import differences
    from vmckpt.ui.tables import table
    from vmckpt.units import format_size

    key = key_source(key_file, key_command)
    there = catalogue(store, key)
    first, second = there.find(one), there.find(other)
    found = run(differences(first, second, key))
    rows = [
        (area.name, str(area.chunks), format_size(area.chunks * area.chunk_bytes)) for area in found
    ]
    facts = [area._asdict() for area in found]
    text = table(("area", "chunks", "differing"), rows)
    show({"a": first.id, "b": second.id, "areas": facts}, text, as_json=json)


@app.command()
def verify(
    point: Point,
    store: StorePlace = None,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    json: Json = False,
) -> None:
    """Read all of a checkpoint and compare it with its checksums."""
    from vmckpt.checkpoint.look import verify as verify_
    from vmckpt.units import format_size

    key = key_source(key_file, key_command)
    found = find(point, store, key)
    sizes = run(verify_(found, key))
    size = sum(sizes.values())
    text = f"{found.name} is whole: {format_size(size)} read, in {', '.join(sizes)}"
    facts = {"id": found.id, "whole": True, "read_bytes": size, "stores": list(sizes)}
    show(facts, text, as_json=json)


@app.command()
def rm(
    points: Annotated[list[str], typer.Argument(help="Checkpoints: names, or ids.")],
    kind: KindOption = Kind.epoch,
    vm: OfVm = None,
    store: StorePlace = None,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    json: Json = False,
) -> None:
    """Remove checkpoints, from all stores that have them; none needs another.

    Space comes back by `vmckpt store gc`.
    """
    if kind is Kind.savevm:
        for point in points:
            snapshot.delete(_whose(vm), point, json)
        return
    from vmckpt.checkpoint.look import remove

    key = key_source(key_file, key_command)
    there = catalogue(store, key)
    found = [there.find(point) for point in points]
    run(remove(found, key))
    names = ", ".join(one.name for one in found)
    show({"removed": [one.id for one in found]}, f"removed: {names}", as_json=json)


@app.command()
def prune(
    vm: Vm,
    keep_last: Annotated[int, typer.Option("--keep-last", help="The newest so many.")] = 0,
    hourly: Annotated[int, typer.Option("--hourly", help="The newest of so many hours.")] = 0,
    daily: Annotated[int, typer.Option("--daily", help="The newest of so many days.")] = 0,
    weekly: Annotated[int, typer.Option("--weekly", help="The newest of so many weeks.")] = 0,
    max_age: Annotated[
        str | None, typer.Option("--max-age", help="None older than this is kept, e.g. 720h.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option("--max-size", help="The oldest go until this is kept, e.g. 20GiB.")
    ] = None,
    tag: Annotated[
        str | None, typer.Option("--tag", help="Only checkpoints with this key=value.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Do it; else it is only shown.")] = False,
    store: StorePlace = None,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    json: Json = False,
) -> None:
    """Remove the checkpoints that a rule does not keep: shown first, done with --apply."""
    from vmckpt.checkpoint.look import prune as prune_
    from vmckpt.checkpoint.retention import Rule
    from vmckpt.ui.tables import table
    from vmckpt.units import parse_duration_s, parse_size_bytes

    rule = Rule(
        keep_last=keep_last,
        hourly=hourly,
        daily=daily,
        weekly=weekly,
        max_age_s=parse_duration_s(max_age) if max_age else None,
        max_bytes=parse_size_bytes(max_size) if max_size else None,
    )
    wanted = _tags([tag]) if tag else {}
    key = key_source(key_file, key_command)
    there = catalogue(store, key, vm)
    for error in there.silent:
        warn(f"left alone: {error.what}: {error.why}")
    decisions = run(prune_(there.entries, rule, wanted, key, apply=apply))
    rows = [
        (one.entry.name, one.entry.id[:12], "keep" if one.keep else "remove", one.why)
        for one in decisions
    ]
    text = table(("checkpoint", "id", "verdict", "why"), rows)
    if not apply and any(not one.keep for one in decisions):
        text += "\nnothing was removed: add --apply"
    facts = [{"id": d.entry.id, "keep": d.keep, "why": d.why} for d in decisions]
    show({"vm": vm, "applied": apply, "checkpoints": facts}, text, as_json=json)


@app.command()
def restore(
    point: Point,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="The VM goes back to it; what came since is gone.")
    ] = False,
    as_: Annotated[
        str | None,
        typer.Option("--as", help="Make a copy of this name, with an identity of its own."),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Where; else where it was.")] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Have all of its memory there before it runs.")
    ] = False,
    network: Annotated[
        str | None,
        typer.Option("--network", help="plugged or isolated; a copy is isolated unless told."),
    ] = None,
    keep_macs: Annotated[
        bool, typer.Option("--keep-macs", help="A copy starts anew with the original's MACs.")
    ] = False,
    kind: KindOption = Kind.epoch,
    vm: OfVm = None,
    store: StorePlace = None,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    json: Json = False,
) -> None:
    """Make a running VM of a checkpoint; returns when the guest runs."""
    if kind is Kind.savevm:
        snapshot.load(_whose(vm), point, json)
        return
    from vmckpt.checkpoint.operate import restore_to
    from vmckpt.checkpoint.restore import Wish
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory import check_name

    if in_place and as_:
        raise UsageError(
            "--in-place and --as are both given",
            why="the VM goes back, or a copy is made",
            remedy="leave one of them out",
        )
    key = key_source(key_file, key_command)
    found = find(point, store, key)
    where = run(home(found, host, copy=as_ is not None))
    wish = Wish(
        name=check_name(as_, "VM") if as_ else None,
        in_place=in_place,
        eager=eager,
        plugged=_plugged(network, default=as_ is None),
        keep_macs=keep_macs,
    )
    result = run(restore_to(where, found, wish, _tell(json), key))
    for text in result["warnings"]:
        warn(f"warning: {text}")
    text = (
        f"{result['vm']} runs on {result['host']} from {found.name}, {result['running_ms']:.0f} ms"
    )
    show(result, text, as_json=json)


def _whose(vm: str | None) -> str:
    from vmckpt.errors import UsageError

    if vm is None:
        raise UsageError(
            "nobody says whose snapshots are meant",
            why="with --kind savevm they are in the VM's own image",
            remedy="name the VM: --vm NAME, or `list NAME`",
        )
    return vm


def _plugged(network: str | None, *, default: bool) -> bool:
    from vmckpt.errors import UsageError

    if network not in (None, "plugged", "isolated"):
        raise UsageError(
            f"--network {network} is unknown",
            why="it is plugged or isolated",
            remedy="write one of them",
        )
    return default if network is None else network == "plugged"


def _name(name: str | None, vm: str) -> str:
    import time

    from vmckpt.hosts.inventory import check_name

    if name is not None:
        return check_name(name, "checkpoint")
    return f"{vm[:22]}-{time.strftime('%Y%m%d-%H%M%S')}"


def _tags(given: list[str]) -> dict[str, str]:
    from vmckpt.errors import UsageError

    for text in given:
        if not re.fullmatch(r"[^=\s]+=\S*", text):
            raise UsageError(
                f"'{text}' is no tag", why="it has to be key=value", remedy="write e.g. by=ci"
            )
    pairs = [text.partition("=") for text in given]
    return {key: value for key, _, value in pairs}


def _tell(as_json: bool) -> Any:
    return (lambda _: None) if as_json else (lambda step: warn(f"  {step}"))
