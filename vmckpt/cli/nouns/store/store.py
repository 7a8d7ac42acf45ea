"""vmckpt store: init, info, accept, check, repair, gc, copy, ...; `key` is in key.py."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.nouns.store import key as store_key
from vmckpt.cli.nouns.store.opened import backend_of, opened
from vmckpt.cli.options.arguments import Apply, DryRun
from vmckpt.cli.options.stores import (
    CheckedStores,
    OneStore,
    Points,
    ReadDataSubset,
    StoreArgument,
    StoreKey,
    TargetKey,
    key_of,
    location_of,
)
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, run, show
from vmckpt.ui.shown import one_line

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.location import StoreLocation as Location
    from vmckpt.cli.nouns.store.damage import DamageOutput
    from vmckpt.errors import VmckptError
    from vmckpt.store.damage.subset import Subset
    from vmckpt.store.files.manifest import Manifest
    from vmckpt.store.store import Store

app = typer.Typer(
    help="Stores of checkpoints.\n\nA store is a directory, HOST: or HOST:/DIRECTORY, "
    "s3://BUCKET/PREFIX, ssh://HOST/DIRECTORY, or an exported file.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(store_key.app, name="key")


@app.command()
@together
def init(
    location: StoreArgument = None,
    *,
    key: StoreKey,
    key_agent: Annotated[
        bool,
        typer.Option(
            "--key-agent", help="Encrypt the store; ssh-agent's first Ed25519 key opens it."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Create a store, encrypted if a key is given.

    A key file that does not exist is created.
    """
    from vmckpt.checkpoint.catalogue.known_stores import require_never_used
    from vmckpt.checkpoint.catalogue.location import require_as_known
    from vmckpt.store.files.config import require_no_store
    from vmckpt.store.open import create_store
    from vmckpt.store.sealing.keys import make_key_file

    at = location_of(location)
    source, key_file = key_of(*key, from_agent=key_agent), key.key_file
    made = key_file is not None and not Path(key_file).exists()
    if key_file is not None and made:
        make_key_file(Path(key_file))
    is_there = False
    try:
        with backend_of(at) as where:
            require_no_store(where)
            require_never_used(at.location, at.label)
            with create_store(where, source) as store:
                is_there = True  # nothing else opens it, whatever happens here
                require_as_known(at, store.config)
                result = _facts(store)
    except BaseException:
        if key_file is not None and made and not is_there:
            Path(key_file).unlink()
        raise
    text = f"made the store {result['place']}"
    if made:
        text += f"\nits key is in {key_file}: keep a copy elsewhere; without it nothing is readable"
    show(result | {"made_key_file": key_file if made else None}, text, as_json=json)


@app.command()
@together
def info(
    location: StoreArgument = None,
    *,
    key: StoreKey,
    json: Json = False,
) -> None:
    """Show a store's contents and size."""
    from vmckpt.checkpoint.catalogue.known_stores import difference, known
    from vmckpt.ui.tables import fields
    from vmckpt.units import format_size

    with opened(location, key.source(), as_before=False) as store:
        facts = _facts(store) | _contents(store)
        before = known(location_of(location).location)
        facts["changed"] = difference(before, store.config) if before else None
    merged = f", small ones in {facts['bundles']} bundles" if facts["bundles"] else ""
    pairs = [
        ("place", facts["place"]),
        ("id", facts["id"]),
        ("encrypted", facts["encrypted"] or "no"),
        ("checkpoints", f"{facts['checkpoints']}, of {', '.join(facts['vms']) or 'no VM'}"),
        ("restored", format_size(facts["restored_bytes"])),
        ("stored", f"{format_size(facts['stored_bytes'])} in {facts['packs']} packs{merged}"),
    ]
    if facts["damaged"]:
        pairs.append(("damaged", f"{', '.join(facts['damaged'])}: see `vmckpt store check`"))
    if facts["changed"]:
        pairs.append(("CHANGED", f"{facts['changed']} (if that is right: vmckpt store accept)"))
    show(facts, fields(pairs), as_json=json)


@app.command()
def accept(location: StoreArgument = None, json: Json = False) -> None:
    """Accept a store that has replaced another.

    vmckpt remembers which store each location had. It refuses a different one, one that is no
    longer encrypted, one with older keys, and directories that do not belong to the store. If the
    store is gone, this command forgets it.
    """
    from vmckpt.checkpoint.catalogue.known_stores import accept as remember
    from vmckpt.checkpoint.catalogue.known_stores import forget
    from vmckpt.errors import NotFoundError
    from vmckpt.store.backends.backend import OwnFolders
    from vmckpt.store.files.config import read_config
    from vmckpt.store.open import described

    at = location_of(location)
    result: dict[str, Any] = {"place": at.label, "id": None, "encrypted": None}
    try:
        with backend_of(at) as backend:
            config = read_config(backend)
            if isinstance(backend, OwnFolders):
                backend.accept_folders()
    except NotFoundError:
        known = forget(at.location)
        text = f"no store is in {at.label}: " + (
            "the one that was there is forgotten" if known else "none was used there before"
        )
        show(result, text, as_json=json)
        return
    remember(at.location, config)
    result |= {"id": config.id, "encrypted": config.is_encrypted}
    show(result, f"accepted: in {at.label} is {described(config)}", as_json=json)


@app.command()
@together
def check(
    location: CheckedStores = None,
    read_data_subset: ReadDataSubset = None,
    *,
    key: StoreKey,
    json: Json = False,
) -> None:
    """Read a store and verify its checksums.

    Exit code 11 if anything is damaged. Damaged chunks are recorded in the store, so that no new
    checkpoint relies on them.
    """
    from vmckpt.cli.nouns.store.damage import all_checked, checked
    from vmckpt.errors import VmckptError
    from vmckpt.store.check import check as check_store

    subset = _subset(read_data_subset)
    locations, silent = (
        ([location_of(location)], []) if location is not None else _known_locations()
    )
    found, source = [], key.source()
    any_encryption = location is None and len(locations) > 1
    for at in locations:
        try:
            with opened(at, source, any_encryption=any_encryption) as store:
                found.append(checked(store, check_store(store, subset=subset)))
        except VmckptError as exc:
            if len(locations) == 1:
                raise
            silent.append(exc)
    if len(locations) == 1 and not silent:
        _say(found[0], as_json=json)
    else:
        _say(all_checked(found, silent), as_json=json)


def _known_locations() -> "tuple[list[Location], list[VmckptError]]":
    """The stores in which `checkpoint list` looks; where there is none this host's own."""
    from vmckpt.checkpoint.catalogue.catalogue import known_locations
    from vmckpt.hosts.inventory.inventory import all_hosts

    locations, silent = run(known_locations(all_hosts()))
    return (locations, silent) if locations or silent else ([location_of(None)], [])


@app.command()
@together
def repair(
    location: StoreArgument = None,
    apply: Apply = False,
    remove_lost: Annotated[
        bool, typer.Option("--remove-lost", help="Remove checkpoints that cannot be restored.")
    ] = False,
    read_data_subset: ReadDataSubset = None,
    *,
    key: StoreKey,
    json: Json = False,
) -> None:
    """Check a store and repair it.

    Shows possible repairs; --apply makes them: heals damaged chunks whose content exists elsewhere
    in the store, and does the work of `gc`. Checkpoints that cannot be restored are kept unless
    --remove-lost is given.
    """
    from vmckpt.cli.nouns.store.damage import planned, repaired
    from vmckpt.store.damage.repair import plan_repair
    from vmckpt.store.damage.repair import repair as repair_store

    subset = _subset(read_data_subset)
    with opened(location, key.source()) as store:
        plan = plan_repair(store, subset=subset)
        if apply:
            damage = repaired(store, plan, repair_store(store, plan, remove_lost=remove_lost))
        else:
            damage = planned(store, plan, remove_lost=remove_lost)
    _say(damage, as_json=json)


def _subset(text: str | None) -> "Subset":
    from vmckpt.store.damage.subset import EVERYTHING, parse_subset

    return parse_subset(text) if text is not None else EVERYTHING


def _say(damage: "DamageOutput", *, as_json: bool) -> None:
    if damage.error is None:
        show(damage.result, "\n".join(map(one_line, damage.lines)), as_json=as_json)
        return
    if not as_json:
        print("\n".join(map(one_line, damage.lines)))
    raise damage.error


@app.command()
@together
def gc(
    location: StoreArgument = None,
    dry_run: DryRun = False,
    *,
    key: StoreKey,
    json: Json = False,
) -> None:
    """Free the space that no checkpoint needs."""
    from vmckpt.store.collect import Collected, collect, plan_gc
    from vmckpt.store.files.config import read_config
    from vmckpt.units import format_size

    with opened(location, key.source()) as store:
        plan = plan_gc(store)
        done = Collected(plan.freed_bytes, 0, {}) if dry_run else collect(store, plan)
        is_raised = read_config(store.opened.backend).format > store.config.format
    freed = done.freed_bytes
    merged = sum(len(one.packs) for one in plan.merges)
    if not dry_run and not done.bundles:
        merged = 0
    result = {
        "place": store.location,
        "removed": sorted(plan.dead),
        "rewritten": [rewrite.pack_id.hex() for rewrite in plan.rewrites],
        "merged": merged,
        "bundles": done.bundles,
        "leftovers": sorted(plan.leftovers),
        "left_alone": list(plan.damaged),
        "healed_chunks": done.healed,
        "lost_chunks": done.lost,
        "freed_bytes": freed,
        "dry_run": dry_run,
    }
    verb = "would free about" if dry_run else "freed"
    text = (
        f"{verb} {format_size(freed)}: {len(plan.dead)} files removed, "
        f"{len(plan.rewrites)} packs rewritten, {len(plan.leftovers)} leftovers of killed commands"
    )
    if merged:
        text += f"\n{merged} small packs {'would be ' if dry_run else ''}merged"
        text += f" into bundles: {len(plan.merges) if dry_run else done.bundles}"
    elif plan.merges and not dry_run and is_raised:
        text += (
            "\nthe store has format 3 now, which older versions of vmckpt refuse; the next "
            f"gc merges {sum(len(one.packs) for one in plan.merges)} small packs"
        )
    if plan.damaged:
        text += f"\nnot collected, because damaged: {', '.join(plan.damaged)}"
    if done.healed:
        text += f"\n{done.healed} damaged chunks healed: their content was stored again since"
    for pack, count in done.lost.items():
        text += f"\n{pack}: {count} chunks are damaged, and checkpoints need them"
    if done.lost:
        text += "\nsee `vmckpt store check`: they heal when their content is stored again"
    show(result, text, as_json=json)


@app.command()
@together
def export(
    file: Annotated[Path, typer.Argument(help="File to create.")],
    checkpoints: Points = None,
    store: OneStore = None,
    *,
    key: StoreKey,
    json: Json = False,
) -> None:
    """Write checkpoints to a single file.

    Encrypted if the store is.
    """
    from vmckpt.store.open import new_archive

    with opened(store, key.source()) as source, new_archive(file, source) as destination:
        _copy(source, destination, checkpoints, str(file), json)


@app.command("import")
@together
def import_(
    file: Annotated[Path, typer.Argument(help="File written by `export`.")],
    checkpoints: Points = None,
    store: OneStore = None,
    *,
    key: StoreKey,
    target_key: TargetKey,
    json: Json = False,
) -> None:
    """Copy checkpoints from an exported file to a store.

    Existing ones are skipped.
    """
    with (
        opened(str(file), key.source()) as source,
        opened(store, target_key.source(), to_write=True) as destination,
    ):
        _copy(source, destination, checkpoints, destination.location, json)


@app.command()
@together
def copy(
    destination: Annotated[str, typer.Argument(help="Destination store.", metavar="LOCATION")],
    checkpoints: Points = None,
    store: OneStore = None,
    *,
    key: StoreKey,
    target_key: TargetKey,
    json: Json = False,
) -> None:
    """Copy checkpoints to another store.

    Existing ones are skipped.
    """
    with (
        opened(store, key.source()) as source,
        opened(destination, target_key.source(), to_write=True) as other,
    ):
        _copy(source, other, checkpoints, other.location, json)


def _copy(
    source: "Store", destination: "Store", checkpoints: list[str] | None, location: str, json: bool
) -> None:
    from vmckpt.cli.output import note
    from vmckpt.errors import NotFoundError
    from vmckpt.store.copying import copy_checkpoints
    from vmckpt.store.errors import damaged
    from vmckpt.units import format_size

    there_are = source.catalogue()
    wanted = [source.find(text) for text in checkpoints] if checkpoints else there_are.manifests

    def heard(manifest: "Manifest") -> None:
        note(f"{manifest.id} of {manifest.vm}: {format_size(manifest.added_bytes)}")

    copied = copy_checkpoints(source, destination, wanted, heard)
    ids, there = [manifest.id for manifest in copied], destination.ids()
    gone = [manifest.id for manifest in wanted if manifest.id not in there]
    if checkpoints and gone:
        raise NotFoundError(
            f"{len(gone)} of {len(wanted)} checkpoints are not in {location}",
            why=f"another command has removed them from {source.location}: {', '.join(gone)}",
            remedy="see: vmckpt checkpoint list",
        )
    if there_are.damaged and not checkpoints:
        raise damaged(
            f"{len(there_are.damaged)} of {len(wanted) + len(there_are.damaged)} checkpoints were "
            "not copied",
            "; ".join(f"{one}: {exc.why}" for one, exc in list(there_are.damaged.items())[:5]),
        )
    added = sum(manifest.added_bytes for manifest in copied)
    result = {
        "target": location,
        "copied": ids,
        "there_already": [m.id for m in wanted if m.id in there and m.id not in ids],
        "added_bytes": added,
    }
    text = f"copied {len(ids)} of {len(wanted)} checkpoints to {location}: {format_size(added)}"
    show(result, text, as_json=json)


def _facts(store: "Store") -> dict[str, Any]:
    from vmckpt.store.sealing.wrapping import keys_of

    config = store.config
    keys = keys_of(config)
    return {
        "place": store.location,
        "id": config.id,
        "format": config.format,
        "created_unix_s": config.created_unix_s,
        "encrypted": " + ".join(dict.fromkeys(one.kind for one in keys)) or None,
        "keys": len(keys),
    }


def _contents(store: "Store") -> dict[str, Any]:
    catalogue = store.catalogue()
    names = store.opened.backend.names
    held = store.opened.backend.list_holdings()
    others = (names(folder).values() for folder in ("maps", "checkpoints"))
    areas = [area for manifest in catalogue.manifests for area in manifest.areas]
    return {
        "checkpoints": len(catalogue.manifests),
        "damaged": sorted(catalogue.damaged),
        "vms": sorted({manifest.vm for manifest in catalogue.manifests}),
        "restored_bytes": sum(area.size_bytes for area in areas),
        "packs": len(held.sizes()),
        "bundles": len(held.bundles),
        "stored_bytes": held.stored_bytes + sum(map(sum, others)),
    }
