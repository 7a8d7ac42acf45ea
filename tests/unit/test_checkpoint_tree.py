"""Checkpoints as a tree, and what one says of itself."""

from dataclasses import replace

import pytest

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.catalogue.location import StoreLocation
from vmckpt.checkpoint.catalogue.tree import lines, rows
from vmckpt.checkpoint.facts import (
    CheckpointFacts,
    UnknownFactsError,
    machine_from_json,
    machine_to_json,
)
from vmckpt.qemu.compare import GuestMachine
from vmckpt.store.files.manifest import AreaFacts, Manifest

MACHINE = GuestMachine(
    "pc-q35-10.0-machine",
    1,
    "qemu64-x86_64-cpu",
    frozenset({(("cpuid-input-eax", 1), ("cpuid-register", "EDX"), ("features", 7))}),
    {"nic0": "virtio-net-pci"},
)


def facts(name: str) -> CheckpointFacts:
    return CheckpointFacts(
        name=name,
        host="lab-a",
        taken_unix_s=1.0,
        trigger="operator",
        tags={"by": "ci"},
        spec='name = "web"\nmemory = "64M"',
        platform={"machine": "pc-q35-10.0", "accel": "tcg", "cpu": "qemu64"},
        qemu_version="10.0.2",
        machine=machine_to_json(MACHINE),
        firmware=None,
        memory_bytes=64 << 20,
        disks=(),
        macs=("52:54:00:00:00:01",),
        pause_ms=4.25,
        stopped_ms=9.5,
        passes=2,
        took_s=1.5,
        changed_pages=20,
    )


def entry(name: str, number: int, parent: str | None) -> CatalogueEntry:
    areas = (AreaFacts("ram", 64 << 20, 4096, 256, 256, 256),)
    given = facts(name)
    manifest = Manifest(
        f"{name}{'0' * 31}", "web", parent and f"{parent}{'0' * 31}", number, 1 << 20, areas, (),
        (), given.to_json(),
    )  # fmt: skip
    return CatalogueEntry((StoreLocation(None, "s3://store"),), manifest, given)


def test_a_line_stays_flat_and_a_branch_moves_in() -> None:
    listed = [entry("a", 1, None), entry("b", 2, "a"), entry("c", 3, "b"), entry("d", 4, "a")]
    assert [row[0] for row in rows(listed)] == ["a", "└ b", "  c", "└ d"]


def test_a_chain_longer_than_python_recurses() -> None:
    chain = [renamed(entry("a", n, None), n, n - 1 if n else None) for n in range(5000)]
    found = rows(chain)
    assert [row[1] for row in found] == [one.id[:12] for one in chain]
    assert {row[0] for row in found} == {"a"}


def test_a_ring_of_parents_hides_nothing() -> None:
    ring = [renamed(entry("a", n, None), n, (n + 1) % 3) for n in range(3)]
    assert {row[1] for row in rows(ring)} == {one.id[:12] for one in ring}


def test_two_vms_of_one_name_are_told_apart() -> None:
    ids = [f"{letter * 8}-0000-4000-8000-{letter * 12}" for letter in "ab"]
    both = [with_vm_id(entry("a", 1, None), ids[0]), with_vm_id(entry("b", 2, None), ids[1])]
    assert [row[2] for row in rows(both)] == ["web (aaaaaaaa)", "web (bbbbbbbb)"]
    assert [row[2] for row in rows(both[:1])] == ["web"]
    assert dict(lines(both[0]))["vm id"] == ids[0]


def renamed(one: CatalogueEntry, number: int, parent: int | None) -> CatalogueEntry:
    ids = [None if n is None else f"{n:012d}{'0' * 20}" for n in (number, parent)]
    return replace(one, manifest=replace(one.manifest, id=str(ids[0]), parent=ids[1]))


def with_vm_id(one: CatalogueEntry, vm_id: str) -> CatalogueEntry:
    return replace(one, manifest=replace(one.manifest, vm_id=vm_id))


def test_a_checkpoint_whose_parent_was_removed_stands_first() -> None:
    assert [row[0] for row in rows([entry("b", 2, "a"), entry("c", 3, "b")])] == ["b", "c"]


def test_what_is_shown_names_machine_and_pause() -> None:
    shown = dict(lines(entry("a", 1, None)))
    assert shown["machine"] == "pc-q35-10.0, tcg"
    assert shown["pause"] == "4.2 ms at most, 9.5 ms in all"
    assert shown["ram"] == "1.00 MiB of 64.0 MiB are not zero"


@pytest.mark.parametrize("said", [{}, {"devices": 5}, {"devices": [1, {}]}, {"vcpus": []}])
def test_a_machine_of_any_words_is_shown(said: dict[str, object]) -> None:
    one = entry("a", 1, None)
    hostile = replace(facts("a"), machine=said, platform={})
    assert dict(lines(replace(one, facts=hostile)))["machine"] == "?, ?"


def test_facts_survive_the_manifest() -> None:
    manifest = Manifest.decode("a" * 32, entry("a", 1, None).manifest.encode())
    again = CheckpointFacts.from_json(manifest.facts)
    assert again == facts("a")
    assert machine_from_json(again.machine) == MACHINE


def test_facts_of_another_version_are_told_apart() -> None:
    for broken in ({"format": 2}, {}, {"format": 1, "name": "x"}):
        try:
            CheckpointFacts.from_json(broken)
        except UnknownFactsError:
            continue
        raise AssertionError(broken)
