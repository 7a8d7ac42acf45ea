"""vmckpt checkpoint restore."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vmckpt.cli.confirm import Yes, confirm
from vmckpt.cli.nouns import snapshot
from vmckpt.cli.nouns.checkpoint import group as groups
from vmckpt.cli.options.checkpoint_given import one_of, plugged, teller
from vmckpt.cli.options.checkpoint_kinds import require_disks_only, require_of_group, whose
from vmckpt.cli.options.checkpoint_options import (
    As,
    CheckpointKind,
    DisksOnly,
    Eager,
    InPlace,
    KeepMacs,
    KindOption,
    MaybePoint,
    Network,
    OfGroup,
    OfVm,
    Trust,
    Where,
)
from vmckpt.cli.options.stores import Stored
from vmckpt.cli.options.together import together
from vmckpt.cli.options.which_checkpoint import find, home
from vmckpt.cli.output import Json, run, show, warn

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
    from vmckpt.checkpoint.restore.requests import RestoreOptions
    from vmckpt.hosts.host import Host


@together
def restore(
    point: MaybePoint = None,
    group: OfGroup = None,
    in_place: InPlace = False,
    as_: As = None,
    host: Where = None,
    eager: Eager = False,
    disks_only: DisksOnly = False,
    network: Network = None,
    keep_macs: KeepMacs = False,
    trust: Trust = False,
    kind: KindOption = CheckpointKind.epoch,
    vm: OfVm = None,
    *,
    stored: Stored,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Restore a checkpoint as a running VM.

    Returns when the guest runs. With --group, all VMs of a group return to it, or none. With
    --disks-only the VM is off.
    """
    one = one_of(point, group, "a checkpoint")
    require_of_group(group, kind, {"--as": as_, "--keep-macs": keep_macs or None}, outside=False)
    if disks_only:
        require_disks_only(group, kind, eager=eager)
    if kind is CheckpointKind.internal:
        snapshot.load(whose(vm), str(one), yes, json)
        return
    from dataclasses import asdict

    from vmckpt.checkpoint.operate import restore_disks_to, restore_to

    key = stored.key()
    options = _options(
        as_, network, in_place=in_place, eager=eager, keep_macs=keep_macs, trust=trust
    )
    if one is None:
        groups.restore(str(group), options, host, stored.store, key, yes=yes, as_json=json)
        return
    found = find(one, stored.store, key)
    where = run(home(found, host, copy=as_ is not None))
    if in_place:
        confirm(_loss(found, where, disks_only=disks_only), yes=yes, as_json=json)
    if disks_only:
        off = run(restore_disks_to(where, found, options, key))
        lines = [f"{off.vm} is off on {off.host}, with the disks of {found.name}:", *off.disks]
        _tell(asdict(off), "\n  ".join(lines), off.warnings, as_json=json)
        return
    runs = run(restore_to(where, found, options, teller(json), key))
    text = f"{runs.vm} runs on {runs.host} from {found.name}, {runs.running_ms:.0f} ms"
    _tell(asdict(runs), text, runs.warnings, as_json=json)


def _loss(found: "CatalogueEntry", where: "Host", *, disks_only: bool) -> str:
    """What a restore in place of a VM of vmckpt takes away; refused for others."""
    from vmckpt.checkpoint.catalogue.tree import in_words
    from vmckpt.drivers.find import require_own

    run(require_own(found.manifest.vm, where))
    return (
        f"{found.manifest.vm} goes back to {in_words(found)}.\n"
        f"All that its {'' if disks_only else 'memory and '}disks got since then is lost."
    )


def _options(
    as_: str | None,
    network: str | None,
    *,
    in_place: bool,
    eager: bool,
    keep_macs: bool,
    trust: bool,
) -> "RestoreOptions":
    from vmckpt.checkpoint.restore.requests import RestoreOptions
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory.inventory import check_name

    if in_place and as_:
        raise UsageError(
            "--in-place and --as are both given",
            why="a checkpoint replaces its VM, or becomes a new one",
            remedy="leave one of them out",
        )
    return RestoreOptions(
        name=check_name(as_, "VM") if as_ else None,
        in_place=in_place,
        eager=eager,
        plugged=plugged(network, default=as_ is None),
        keep_macs=keep_macs,
        trust=trust,
    )


def _tell(facts: dict[str, Any], text: str, warnings: Iterable[str], *, as_json: bool) -> None:
    for warning in warnings:
        warn(f"warning: {warning}")
    show(facts, text, as_json=as_json)
