"""Present checkpoints to people: as a tree, and one in detail. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.catalogue.whose import vm_labels
from vmckpt.units import counted, format_size, format_time


def rows(entries: Sequence[CatalogueEntry]) -> list[tuple[str, ...]]:
    """One row per checkpoint, below its parent if that still exists."""
    present = {one.id for one in entries}
    children: dict[str | None, list[CatalogueEntry]] = {}
    for one in entries:
        parent = one.manifest.parent if one.manifest.parent in present else None
        children.setdefault(parent, []).append(one)
    found: list[tuple[str, ...]] = []
    # Rows still to be shown, the next one last. No recursion: chains exceed Python's limit.
    waiting = [(one, 0, False) for one in reversed(children.get(None, []))]
    labels = vm_labels([one.manifest for one in entries])
    shown = set[str]()
    while waiting:
        one, depth, is_branch = waiting.pop()
        # A line of descent is not indented; only a branch is.
        mark = "  " * depth + ("└ " if is_branch else "")
        found.append(_row(one, mark, labels[one.id]))
        shown.add(one.id)
        below = children.get(one.id, [])
        inner = depth + is_branch
        waiting += [(child, inner, len(below) > 1) for child in reversed(below)]
    # Only a forged manifest makes a cycle of parents; show its checkpoints too.
    rest = [one for one in entries if one.id not in shown]
    return found + [_row(one, "", labels[one.id]) for one in rest]


def _row(entry: CatalogueEntry, mark: str, vm: str) -> tuple[str, ...]:
    facts, manifest = entry.facts, entry.manifest
    return (
        f"{mark}{entry.name}",
        manifest.id[:12],
        vm,
        ", ".join(location.label for location in entry.locations),
        format_time(manifest.created_unix_s),
        format_size(manifest.added_bytes),
        f"{facts.pause_ms:.1f} ms" if facts else "?",
        facts.trigger if facts else "?",
        str(facts.group["name"]) if facts and facts.group else "",
        ("guard" if any(pin.guard for pin in entry.pins) else "pinned") if entry.pins else "",
        " ".join(f"{key}={value}" for key, value in facts.tags.items()) if facts else "",
    )


class OriginShown(NamedTuple):
    """Whether this site took a checkpoint, and, if not, what a host would open for it."""

    foreign: bool
    opens: tuple[str, ...]


OWN = OriginShown(foreign=False, opens=())


def lines(entry: CatalogueEntry, origin: OriginShown = OWN) -> list[tuple[str, str]]:
    """The output of `checkpoint show`."""
    manifest, facts = entry.manifest, entry.facts
    found = [
        ("id", manifest.id),
        ("vm", manifest.vm),
        ("vm id", manifest.vm_id or "- (taken before VMs had one)"),
        ("taken", format_time(manifest.created_unix_s)),
        ("parent", manifest.parent or "-"),
        ("store", ", ".join(location.label for location in entry.locations)),
        ("added", format_size(manifest.added_bytes)),
        *(("pinned", f"{format_time(pin.pinned_unix_s)}: {pin.in_words}") for pin in entry.pins),
    ]
    found += [
        (area.name, f"{format_size(area.chunks * area.chunk_bytes)} of "
         f"{format_size(area.size_bytes)} are not zero")
        for area in manifest.areas
    ]  # fmt: skip
    if facts is None:
        return [*found, ("facts", "written by another version of vmckpt")]
    # Another site may have written anything here.
    platform, devices = facts.platform.get, facts.machine.get("devices")
    devices = devices if isinstance(devices, dict | list) else ()
    return [
        ("name", facts.name),
        *found,
        *((("origin", "not taken by this site"),) if origin.foreign else ()),
        *(("opens", text) for text in origin.opens),
        ("host", facts.host),
        ("trigger", facts.trigger),
        ("tags", " ".join(f"{key}={value}" for key, value in facts.tags.items()) or "-"),
        *((("group", f"{facts.group['name']} ({facts.group['id']}): "
            + ", ".join(facts.group["members"])),) if facts.group else ()),
        ("kind", f"{facts.kind} ({facts.saved_as})" if facts.saved_as else facts.kind),
        ("pause", f"{facts.pause_ms:.1f} ms at most, {facts.stopped_ms:.1f} ms in all"),
        ("passes", str(facts.passes)),
        ("took", f"{facts.took_s:.2f} s"),
        ("qemu", facts.qemu_version),
        ("machine", f"{platform('machine', '?')}, {platform('accel', '?')}"),
        ("cpu", f"{platform('cpu', '?')}, {_vcpus(facts.machine.get('vcpus'))}"),
        ("firmware", facts.firmware or "-"),
        ("devices", ", ".join(sorted(map(str, devices))) or "-"),
        *(("disk", f"{disk.path} ({disk.format}, {format_size(disk.size_bytes)})")
          for disk in facts.disks),
    ]  # fmt: skip


def _vcpus(number: object) -> str:
    return counted(number, "vCPU") if isinstance(number, int) else "? vCPUs"


def in_words(entry: CatalogueEntry) -> str:
    """One line: which checkpoint, of which VM, and when it was taken."""
    taken = format_time(entry.manifest.created_unix_s)
    return f"{entry.name} ({entry.id[:12]}) of {entry.manifest.vm}, taken {taken}"
