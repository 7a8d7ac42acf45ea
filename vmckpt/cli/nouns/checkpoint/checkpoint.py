"""vmckpt checkpoint: create, list, show, diff, verify, pin, rm, prune, restore, and its disks."""

from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.confirm import Yes, confirm
from vmckpt.cli.nouns import snapshot
from vmckpt.cli.nouns.checkpoint import disks
from vmckpt.cli.nouns.checkpoint import group as groups
from vmckpt.cli.nouns.checkpoint.restore import restore
from vmckpt.cli.options.arguments import Apply, MaxPause, MaybeVmName, VmName, pause_s
from vmckpt.cli.options.checkpoint_given import given_name, given_tags, one_of, teller
from vmckpt.cli.options.checkpoint_kinds import require_of_group, require_replaceable, whose
from vmckpt.cli.options.checkpoint_options import (
    CheckpointKind,
    KindOption,
    MaxHold,
    MaybePoint,
    Members,
    Name,
    OfGroup,
    OfVm,
    OnlyTag,
    OnlyVm,
    Point,
    Points,
    Replace,
    Retention,
    Tags,
    Trigger,
    VmId,
)
from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.stores import Stored
from vmckpt.cli.options.together import together
from vmckpt.cli.options.which_checkpoint import catalogue, find
from vmckpt.cli.output import Json, run, show, warn
from vmckpt.ui.shown import one_line

if TYPE_CHECKING:
    from vmckpt.checkpoint.requests import TakenCheckpoint

app = typer.Typer(
    help="Checkpoints of VMs: create, restore, fork, prune.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
@together
def create(
    vm: MaybeVmName = None,
    group: Members = None,
    name: Name = None,
    tag: Tags = None,
    max_pause: MaxPause = None,
    max_hold: MaxHold = None,
    trigger: Trigger = "operator",
    kind: KindOption = CheckpointKind.epoch,
    replace: Replace = False,
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Take a checkpoint of a running VM.

    It contains memory, devices and disks at one moment. With --group, a consistent checkpoint of
    several VMs on any hosts.
    """
    one = one_of(vm, group, "a VM")
    require_of_group(group, kind, {"--max-hold": max_hold})
    require_replaceable(name, group, kind, replace=replace)
    if kind is CheckpointKind.internal:
        snapshot.save(str(one), given_name(name, str(one)), json)
        return
    from vmckpt.checkpoint.requests import TakeOptions
    from vmckpt.cli.found import find as find_vm
    from vmckpt.cli.tree.names import CHECKPOINTS, remember_new

    allowed_s = pause_s(max_pause, kind.value)
    tags = given_tags(tag or [])
    key = stored.key()
    # A generated name was not chosen by the user: if it is taken, it gets a number.
    if_taken = "replace" if replace else "refuse" if name or group else "number"
    options = TakeOptions(
        given_name(name, one or "group"), tags, trigger, allowed_s, kind.value, if_taken=if_taken
    )
    if one is None:
        groups.create(str(group), options, max_hold, stored.store, key, as_json=json)
        return
    taken = run(run(find_vm(one)).checkpoint(stored.store, options, teller(json), key))
    remember_new(CHECKPOINTS, taken.facts.name)
    if taken.not_replaced:
        warn(f"warning: the one that it replaces is still there: {taken.not_replaced}")
    if why := taken.not_ended:
        warn(f"warning: something of it is left for the next checkpoint to settle: {why}")
    show({"vm": one, **taken.to_json()}, _taken_text(one, taken), as_json=json)


def _taken_text(vm: str, taken: "TakenCheckpoint") -> str:
    from vmckpt.units import format_size

    text = (
        f"{taken.facts.name} is checkpoint {taken.id[:12]} of {vm}: paused "
        f"{taken.facts.pause_ms:.1f} ms, {format_size(taken.stored_bytes)} stored, "
        f"{taken.facts.took_s:.2f} s in all"
    )
    if taken.apart:
        text += f"\nall of it is stored: earlier ones are elsewhere (vmckpt checkpoint list {vm})"
    if taken.damaged:
        text += f"\nall of it is stored again: {taken.damaged} (vmckpt store check)"
    if taken.replaced:
        text += f"\nreplaced: {', '.join(id_[:12] for id_ in taken.replaced)}"
    return text


@app.command("list")
@together
def list_(
    vm: OnlyVm = None,
    kind: KindOption = CheckpointKind.epoch,
    *,
    stored: Stored,
    listing: ListOptions,
) -> None:
    """List checkpoints as a tree, each below its parent."""
    if kind is CheckpointKind.internal:
        snapshot.list_snapshots(whose(vm), listing)
        return
    from vmckpt.checkpoint.catalogue.catalogue import to_json
    from vmckpt.checkpoint.catalogue.tree import rows
    from vmckpt.cli.tree.names import CHECKPOINTS, remember

    key = stored.key()
    groups.settle(key)
    found = catalogue(stored.store, key, vm)
    for error in found.silent:
        warn(f"not listed: {error.what}: {error.why}")
    if vm is None:
        remember(CHECKPOINTS, [one.name for one in found.entries])
    head = (
        "checkpoint",
        "id",
        "vm",
        "store",
        "taken",
        "added",
        "pause",
        "trigger",
        "group",
        "pin",
        "tags",
    )
    facts = {
        "checkpoints": [to_json(one) for one in found.entries],
        "silent": [{"what": error.what, "why": error.why} for error in found.silent],
    }
    listing.layout().show(facts, head, rows(found.entries), wide=("trigger", "store"))


@app.command("show")
@together
def show_(
    point: MaybePoint = None,
    group: OfGroup = None,
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Show details of a checkpoint, or the members of a group."""
    if (one := one_of(point, group, "a checkpoint")) is None:
        key = stored.key()
        groups.show_(str(group), stored.store, key, as_json=json)
        return
    from vmckpt.checkpoint.catalogue.catalogue import to_json
    from vmckpt.checkpoint.catalogue.tree import lines
    from vmckpt.checkpoint.operate import standing
    from vmckpt.ui.tables import fields, without_empty

    found = find(one, stored.store, stored.key())
    origin = run(standing(found))
    show(
        to_json(found) | origin._asdict(), fields(without_empty(lines(found, origin))), as_json=json
    )


@app.command()
@together
def diff(
    one: Point,
    other: Point,
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Show how much differs between two checkpoints.

    Memory and disk content of two checkpoints in one store.
    """
    from vmckpt.checkpoint.catalogue.maintain import differences
    from vmckpt.ui.tables import table
    from vmckpt.units import format_size

    key = stored.key()
    there = catalogue(stored.store, key)
    first, second = there.find(one), there.find(other)
    found = run(differences(first, second, key))
    rows = [
        (area.name, str(area.chunks), format_size(area.chunks * area.chunk_bytes)) for area in found
    ]
    facts = [area._asdict() for area in found]
    text = table(("area", "chunks", "differing"), rows)
    show({"a": first.id, "b": second.id, "areas": facts}, text, as_json=json)


@app.command()
@together
def verify(
    point: Point,
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Read a whole checkpoint and verify its checksums."""
    from vmckpt.checkpoint.catalogue.maintain import verify as verify_
    from vmckpt.units import format_size

    key = stored.key()
    found = find(point, stored.store, key)
    sizes = run(verify_(found, key))
    size = sum(sizes.values())
    text = f"{found.name} is intact: {format_size(size)} read, in {', '.join(sizes)}"
    facts = {"id": found.id, "whole": True, "read_bytes": size, "stores": list(sizes)}
    show(facts, text, as_json=json)


@app.command()
@together
def pin(
    point: Point,
    reason: Annotated[str, typer.Option("--reason", help="Reason.", metavar="TEXT")] = "by hand",
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Protect a checkpoint from removal.

    `rm`, `prune` and schedules keep it until it is unpinned.
    """
    from vmckpt.checkpoint.catalogue.pinning import check_reason
    from vmckpt.checkpoint.catalogue.pinning import pin as pin_

    key = stored.key()
    found = find(point, stored.store, key)
    made = run(pin_(found, check_reason(reason), key))
    text = f"{found.name} ({found.id[:12]}) is pinned: {made.in_words}"
    show({"checkpoint": found.id, "pin": made.to_json()}, text, as_json=json)


@app.command()
@together
def unpin(
    point: Point,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also remove a guard's pin, although the guard may still need it."
        ),
    ] = False,
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Remove a checkpoint's pins."""
    from vmckpt.checkpoint.catalogue.pinning import unpin as unpin_

    key = stored.key()
    found = find(point, stored.store, key)
    gone = run(unpin_(found, key, force=force))
    facts = {"checkpoint": found.id, "unpinned": [one.to_json() for one in gone]}
    show(facts, f"{found.name} ({found.id[:12]}) is no longer pinned", as_json=json)


@app.command()
@together
def rm(
    points: Points = None,
    group: OfGroup = None,
    kind: KindOption = CheckpointKind.epoch,
    vm: OfVm = None,
    *,
    stored: Stored,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove checkpoints from all stores that have them.

    Other checkpoints do not depend on them. `vmckpt store gc` frees the space.
    """
    one_of(points[0] if points else None, group, "a checkpoint")
    points = points or []
    require_of_group(group, kind, {})
    if kind is CheckpointKind.internal:
        for point in points:
            snapshot.rm(whose(vm), point, yes, json)
        return
    from vmckpt.checkpoint.catalogue.maintain import remove, remove_unreadable
    from vmckpt.checkpoint.catalogue.tree import in_words

    key = stored.key()
    if group is not None:
        groups.remove(group, stored.store, key, yes=yes, as_json=json)
        return
    there = catalogue(stored.store, key)
    bad = [one for point in points for one in there.find_unreadable(point)]
    found = [there.find(point) for point in points if not there.find_unreadable(point)]
    lost = [in_words(one) for one in found]
    lost += [f"{one.id} in {one.location.label}, which cannot be read" for one in bad]
    text = "\n".join(f"  {one_line(line)}" for line in lost)
    confirm(f"Removed for good, from every store that has it:\n{text}", yes=yes, as_json=json)
    run(remove(found, key))
    run(remove_unreadable(bad, key))
    ids = [one.id for one in found] + sorted({one.id for one in bad})
    names = ", ".join([one.name for one in found] + sorted({one.id for one in bad}))
    show({"removed": ids}, f"removed: {names}", as_json=json)


@app.command()
@together
def prune(
    vm: VmName,
    *,
    retention: Retention,
    vm_id: VmId = None,
    tag: OnlyTag = None,
    apply: Apply = False,
    stored: Stored,
    json: Json = False,
) -> None:
    """Apply a retention rule to checkpoints.

    Shows the checkpoints that it would remove; --apply removes them.
    """
    from vmckpt.checkpoint.catalogue.maintain import prune as prune_
    from vmckpt.checkpoint.catalogue.whose import chosen
    from vmckpt.hosts.inventory.inventory import all_hosts
    from vmckpt.ui.tables import table
    from vmckpt.vm.identity import identities

    rule = retention.rule()
    wanted = given_tags([tag]) if tag else {}
    key = stored.key()
    there = catalogue(stored.store, key, vm)
    for error in there.silent:
        warn(f"not pruned: {error.what}: {error.why}")
    whose = chosen(there.entries, vm, run(identities(vm, all_hosts())), vm_id)
    if whose.others:
        warn(
            f"not pruned: {len(whose.others)} checkpoints of another VM named '{vm}', or from "
            f"before VMs had ids; to prune them: --vm-id ID (see vmckpt checkpoint list {vm})"
        )
    decisions, clocks = run(prune_(whose.mine, rule, wanted, key, apply=apply))
    if clocks:
        warn(clocks)
    rows = [
        (one.entry.name, one.entry.id[:12], "keep" if one.keep else "remove", one.why)
        for one in decisions
    ]
    text = table(("checkpoint", "id", "verdict", "why"), rows)
    if not apply and any(not one.keep for one in decisions):
        text += "\nnothing was removed: add --apply"
    facts = [{"id": d.entry.id, "keep": d.keep, "why": d.why} for d in decisions]
    result = {"vm": vm, "applied": apply, "checkpoints": facts, "clocks": clocks or None}
    show(result, text, as_json=json)


app.command()(restore)
app.command()(disks.export_disk)
app.command()(disks.export)
app.command()(disks.serve_disk)
app.command()(disks.mount)
