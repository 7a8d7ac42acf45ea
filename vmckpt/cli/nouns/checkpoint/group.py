"""vmckpt checkpoint create|show|rm|restore --group: several VMs at one consistent cut."""

from typing import TYPE_CHECKING, Any

from vmckpt.cli.confirm import confirm
from vmckpt.cli.options.checkpoint_given import teller
from vmckpt.cli.options.which_checkpoint import catalogue
from vmckpt.cli.output import run, show, warn
from vmckpt.ui.shown import one_line

if TYPE_CHECKING:
    from vmckpt.checkpoint.requests import TakeOptions
    from vmckpt.checkpoint.restore.requests import RestoreOptions
    from vmckpt.drivers.driver import Driver
    from vmckpt.group.groups import Group
    from vmckpt.store.sealing.keys import KeySource


def create(
    members: str, options: "TakeOptions", max_hold: str | None, store: str | None,
    key: "KeySource | None", *, as_json: bool,
) -> None:  # fmt: skip
    """Take checkpoints of all members at one cut."""
    from vmckpt.cli.found import find
    from vmckpt.group.create import USUAL_HELD_S, GroupOptions, require_group
    from vmckpt.group.create import create as create_
    from vmckpt.sequence.steps import all_of
    from vmckpt.units import parse_duration_s

    names = [name.strip() for name in members.split(",") if name.strip()]
    require_group(names)
    settle(key)

    async def found() -> "list[Driver]":
        return await all_of(find(name) for name in names)

    most_held_s = parse_duration_s(max_hold) if max_hold else USUAL_HELD_S
    group_options = GroupOptions(options.name, options, most_held_s, store)
    result = run(create_(run(found()), group_options, teller(as_json), key))
    points = result["members"]
    text = (
        f"{result['name']} is group {result['group']} of {', '.join(points)}: stopped within "
        f"{result['skew_ms']:.1f} ms, paused {_most(points, 'pause_ms')} ms, output held "
        f"{result['held_ms']:.1f} ms"
    )
    show(result, text, as_json=as_json)


def _most(points: dict[str, Any], name: str) -> str:
    values = [one[name] for one in points.values() if name in one]
    return f"{max(values):.1f}" if values else "?"


def show_(text: str, store: str | None, key: "KeySource | None", *, as_json: bool) -> None:
    """Show a group."""
    from vmckpt.ui.tables import table
    from vmckpt.units import format_size, format_time

    group = _find(text, store, key)
    rows, members = [], {}
    for vm, id_ in group.members.items():
        entry = group.entries.get(vm)
        facts = entry.facts if entry else None
        members[vm] = {"id": id_, "stores": [one.label for one in entry.locations] if entry else []}
        rows.append(
            (
                vm,
                id_[:12],
                ", ".join(location.label for location in entry.locations) if entry else "missing",
                format_size(entry.manifest.added_bytes) if entry else "-",
                f"{facts.pause_ms:.1f} ms" if facts else "-",
                facts.host if facts else "-",
            )
        )
    taken = [one.manifest.created_unix_s for one in group.entries.values()]
    when = format_time(min(taken))
    state = f"not whole: {', '.join(group.missing)} missing" if group.missing else "whole"
    shown = f"{group.name}, group {group.id}, taken {when}: {state}\n"
    shown += table(("vm", "checkpoint", "store", "added", "pause", "host"), rows)
    facts_ = {"group": group.id, "name": group.name, "whole": not group.missing}
    show({**facts_, "members": members}, shown, as_json=as_json)


def remove(
    text: str, store: str | None, key: "KeySource | None", *, yes: bool, as_json: bool
) -> None:
    """Remove all checkpoints of a group that are there."""
    from vmckpt.checkpoint.catalogue.maintain import remove as remove_

    group = _find(text, store, key)
    lost = _members(group)
    confirm(f"Removed for good, from every store that has it:\n{lost}", yes=yes, as_json=as_json)
    run(remove_(list(group.entries.values()), key))
    removed = [one.id for one in group.entries.values()]
    show({"removed": removed}, f"removed: {group.name} ({len(removed)})", as_json=as_json)


def restore(
    text: str, options: "RestoreOptions", host: str | None, store: str | None,
    key: "KeySource | None", *, yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """All VMs of a group go back to it."""
    from vmckpt.group.groups import require_whole
    from vmckpt.group.restore import homes, restore_group
    from vmckpt.hosts.inventory.inventory import find_host

    group = _find(text, store, key)
    require_whole(group)
    if options.in_place:
        confirm(
            f"All VMs of the group go back to {group.name}:\n{_members(group)}\n"
            "All that their memory and disks got since then is lost.",
            yes=yes,
            as_json=as_json,
        )

    hosts = dict.fromkeys(group.entries, find_host(host)) if host else run(homes(group, warn))
    result = run(restore_group(group, hosts, options, teller(as_json), key))
    for vm, one in result["members"].items():
        for shown in one["warnings"]:
            warn(f"warning: {vm}: {shown}")
    there = ", ".join(f"{vm} on {one['host']}" for vm, one in result["members"].items())
    show(result, f"all of {group.name} run from it: {there}", as_json=as_json)


def _members(group: "Group") -> str:
    from vmckpt.checkpoint.catalogue.tree import in_words

    return "\n".join(f"  {one_line(in_words(one))}" for one in group.entries.values())


def settle(key: "KeySource | None") -> None:
    """Finish interrupted commits of groups."""
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.state.documents import names_in

    if not names_in(state_dir() / "groups"):
        return
    from vmckpt.group.journal import settle_left

    for shown in run(settle_left(key)):
        warn(shown)


def _find(text: str, store: str | None, key: "KeySource | None") -> "Group":
    from vmckpt.group.groups import find

    settle(key)
    there = catalogue(store, key)
    for error in there.silent:
        warn(f"not searched: {error.what}: {error.why}")
    return find(there.entries, text)
