"""Checkpoints and packs that say what none says: each is found, is removed, and stops nothing."""

import json
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.guest_like import memory, require_same, save
from vmckpt.checkpoint.catalogue.retention import Candidate, RetentionRule, plan
from vmckpt.checkpoint.facts import CheckpointFacts, UnknownFactsError
from vmckpt.store.backends.archive import MAGIC as ARCHIVE
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.compression import compress
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.damage.repair import plan_repair, repair
from vmckpt.store.errors import DamagedError, UnreadableError
from vmckpt.store.files import checkpoint_file
from vmckpt.store.files.checkpoint_file import AreaMap, Maps, encode_maps
from vmckpt.store.files.header import FileKind
from vmckpt.store.files.manifest import (
    BLOCK_CHUNK_BYTES,
    LATEST_UNIX_S,
    PAGE_CHUNK_BYTES,
    AreaFacts,
    Manifest,
)
from vmckpt.store.files.maps import Refs, encode, make_refs
from vmckpt.store.files.pack import _TRAILER
from vmckpt.store.open import create_store, open_store
from vmckpt.store.sealing.seal import Box
from vmckpt.store.store import Store

PAGES = 64

Words = dict[str, Any]


def manifest_words() -> Words:
    return {
        "vm": "vm",
        "parent": None,
        "created_unix_s": 1.5e9,
        "added_bytes": 1,
        "areas": [],
        "blobs": [],
        "packs": [],
        "facts": {"name": "x"},
    }


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


MANIFESTS: dict[str, Any] = {
    "a list": [],
    "null": None,
    "nothing": {},
    "one word more": {**manifest_words(), "more": 1},
    "vm is a number": {**manifest_words(), "vm": 5},
    "vm is a list": {**manifest_words(), "vm": ["vm"]},
    "vm has an escape": {**manifest_words(), "vm": "\x1b[2J"},
    "vm is long": {**manifest_words(), "vm": "v" * 10_000},
    "parent is an object": {**manifest_words(), "parent": {}},
    "parent is a path": {**manifest_words(), "parent": "../../etc/passwd"},
    "time is text": {**manifest_words(), "created_unix_s": "today"},
    "time is a truth": {**manifest_words(), "created_unix_s": True},
    "time is far": {**manifest_words(), "created_unix_s": 1e300},
    "size is negative": {**manifest_words(), "added_bytes": -1},
    "size is huge": {**manifest_words(), "added_bytes": 1 << 200},
    "areas is text": {**manifest_words(), "areas": "ram"},
    "areas is an object": {**manifest_words(), "areas": {"ram": 1}},
    "an area has five": {**manifest_words(), "areas": [["ram", 4096, 4096, 1, 1]]},
    "an area of no chunks": {**manifest_words(), "areas": [["ram", 4096, 0, 1, 1, 1]]},
    "an area of chunks of 4 GiB": {**manifest_words(), "areas": [["ram", 1, 1 << 32, 1, 1, 1]]},
    "an area of 2^62": {**manifest_words(), "areas": [["ram", 1 << 62, 4096, 1, 1, 1]]},
    "an area's name is null": {**manifest_words(), "areas": [[None, 4096, 4096, 1, 1, 1]]},
    "a blob of 2^62": {**manifest_words(), "blobs": [["b", 1 << 62, 1]]},
    "a blob of -1": {**manifest_words(), "blobs": [["b", 1, -1]]},
    "a blob is text": {**manifest_words(), "blobs": ["b12"]},
    "packs are numbers": {**manifest_words(), "packs": [1, 2]},
    "a pack is not an id": {**manifest_words(), "packs": ["zz"]},
    "facts is a list": {**manifest_words(), "facts": []},
    "facts is text": {**manifest_words(), "facts": "name"},
    "facts are deep": {**manifest_words(), "facts": {"x": deep(500)}},
}
RAW = {
    "no JSON": b"\xff\xfe",
    "a number of many digits": b"9" * 100_000,
    "not a number": json.dumps(manifest_words()).encode().replace(b"1500000000.0", b"NaN"),
    "very deep": b"[" * 200_000 + b"]" * 200_000,
}


def maps_bytes(words: Any, data: bytes = b"") -> bytes:
    head = json.dumps(words).encode()
    return struct.pack(">I", len(head)) + head + data


def area(size: Any, chunk: Any, length: Any = 0) -> bytes:
    return maps_bytes({"base": None, "packs": [], "areas": [["ram", size, chunk, length]]})


MAPS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": maps_bytes({})[:-1],
    "a list": maps_bytes([]),
    "chunks of no bytes": area(4096, 0),
    "chunks of -1 bytes": area(4096, -1),
    "chunks of text": area(4096, "4096"),
    "a size of 2^62": area(1 << 62, 4096),
    "a size that no memory has": area((1 << 32) * 4096, 4096),
    "a length beyond": area(4096, 4096, 1 << 40),
    "a length of -5": area(4096, 4096, -5),
    "a base of no id": maps_bytes({"base": "../store", "packs": [], "areas": []}),
    "packs of text": maps_bytes({"base": None, "packs": "ab", "areas": []}),
    "areas of text": maps_bytes({"base": None, "packs": [], "areas": "ram"}),
    "a map that unpacks to much": maps_bytes(
        {"base": None, "packs": [], "areas": [["ram", 4096 * 64, 4096, 60]]},
        compress(bytes(1 << 20), 9)[:60],
    ),
}


def write_checkpoint(
    store: Store, number: int, manifest: bytes, maps: bytes, lengths: bytes = b""
) -> str:
    """A checkpoint's file, sealed as it has to be, that says that; its id."""
    files, checkpoint_id = store.opened.files, f"{number:032x}"
    name = f"checkpoints/{checkpoint_id}"
    header = files.header(FileKind.CHECKPOINT).new()
    seal = files.sealer.file(header, name)
    first = seal.seal(Box.MANIFEST, 0, compress(manifest, 3))
    second = seal.seal(Box.MAPS, 0, maps)
    lengths = lengths or struct.pack(">II", len(first), len(second))
    files.write(name, [header, lengths, first, second])
    return checkpoint_id


class Bench:
    """A store with one good checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.location, self.folder = folder / "store", folder
        self.ram = memory(PAGES, 1)
        with create_store(str(self.location)) as store:
            self.good = save(store, self.ram)

    def require_harmless(self, hostile: dict[str, str], *, manifests_are_bad: bool) -> None:
        """All that is done to other checkpoints works, and these, named by id, can be removed."""
        with open_store(str(self.location)) as store:
            catalogue = store.catalogue()
            bad = set(hostile) if manifests_are_bad else set()
            assert {hostile[one] for one in catalogue.damaged} == {hostile[one] for one in bad}
            assert self.good.id in [one.id for one in catalogue.manifests]
            lost = check(store).lost
            assert {hostile[one] for one in lost} == set(hostile.values())
            for one, what in hostile.items():
                with pytest.raises(DamagedError), store.read(one):
                    pytest.fail(what)
            require_same(store, store.find(self.good.id), self.ram)
            more = save(store, self.ram, parent=self.good, dirty=np.arange(3))
            require_same(store, more, self.ram)
            with create_store(str(self.folder / "copy")) as target:
                copy_checkpoints(store, target, [self.good])
            plan = plan_repair(store)
            assert set(plan.lost) == set(hostile)
            left = set(hostile) - set(repair(store, plan, remove_lost=True).removed)
            # What a larger machine may read is removed by name alone.
            assert {hostile[one] for one in left} <= {"a size that no memory has"}
            store.remove(left)
            assert check(store).whole
            collect(store, plan_gc(store))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_hostile_manifests(bench: Bench) -> None:
    manifests = {what: json.dumps(words).encode() for what, words in MANIFESTS.items()} | RAW
    maps, written = maps_bytes({"base": None, "packs": [], "areas": []}), {}
    with open_store(str(bench.location)) as store:
        for number, (what, data) in enumerate(manifests.items()):
            written[write_checkpoint(store, number, data, maps)] = what
        lengths = struct.pack(">II", 0xFFFFFFFF, 0xFFFFFFFF)
        written[write_checkpoint(store, 1 << 64, b"{}", b"", lengths)] = "lengths of 4 GiB"
    bench.require_harmless(written, manifests_are_bad=True)


def test_hostile_maps(bench: Bench) -> None:
    manifest, written = json.dumps(manifest_words()).encode(), {}
    with open_store(str(bench.location)) as store:
        for number, (what, data) in enumerate(MAPS.items()):
            written[write_checkpoint(store, number, manifest, data)] = what
        words = {**manifest_words(), "areas": [["ram", 8192, 4096, 1, 1, 1]]}
        other = json.dumps(words).encode()
        written[write_checkpoint(store, 99, other, area(4096, 4096))] = "another shape"
    bench.require_harmless(written, manifests_are_bad=False)


def test_a_manifest_of_a_few_bytes_takes_no_memory_for_millions_of_values(bench: Bench) -> None:
    """21 million in 6 KB took 1.5 GB and 12 s of each command that lists checkpoints."""
    text = json.dumps(manifest_words()).replace('"x"', '"x","l":[' + "[]," * (5 << 20) + "[]]")
    maps = maps_bytes({"base": None, "packs": [], "areas": []})
    with open_store(str(bench.location)) as store:
        one = write_checkpoint(store, 1, text.encode(), maps)
        assert (bench.location / "checkpoints" / one).stat().st_size < 25_000
    bench.require_harmless({one: "millions of values"}, manifests_are_bad=True)


HUGE = ["store", "config/1", f"damaged/{5:032x}", f"maps/{5:032x}"]


@pytest.mark.parametrize("name", HUGE)
def test_a_file_of_any_size_is_not_read_into_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whoever may write there makes one that takes no space: each command ended as by a bug."""
    monkeypatch.setattr(checkpoint_file, "_MOST_MAPS_BYTES", 1 << 20)
    (bench.location / name).parent.mkdir(exist_ok=True)
    with (bench.location / name).open("wb") as file:
        file.truncate(1 << 43)
    with open_store(str(bench.location)) as store:
        more = save(store, bench.ram, parent=bench.good, dirty=np.arange(3))
        require_same(store, more, bench.ram)
        assert name in {one.name for one in check(store).findings}
        collect(store, plan_gc(store))
        assert check(store).whole


def test_what_this_machine_has_no_memory_for_can_be_read_elsewhere(bench: Bench) -> None:
    path = bench.location / f"maps/{5:032x}"
    with path.open("wb") as file:
        file.truncate(1 << 43)
    with open_store(str(bench.location)) as store, pytest.raises(UnreadableError, match="here"):
        store.opened.backend.read(f"maps/{5:032x}")


def huge_table(trailer: list[int]) -> list[int]:
    return [4096, 0xFFFFFFF0, 0xFFFFFFF0, *trailer[3:]]


TRAILERS: dict[str, Callable[[list[int]], list[int]]] = {
    "chunks of no bytes": lambda t: [0, *t[1:]],
    "chunks of 4 GiB": lambda t: [0xFFFFFFFF, *t[1:]],
    "a table of 32 GiB": huge_table,
    "frames that are not there": lambda t: [t[0], t[1] + 1, *t[2:]],
    "more slots": lambda t: [*t[:2], t[2] + 1, *t[3:]],
    "hashes of 4 GiB": lambda t: [*t[:3], 0xFFFFFFFF, *t[4:]],
    "tables of 4 GiB": lambda t: [*t[:4], 0xFFFFFFFF, t[5]],
    "listed twice": lambda t: [*t[:5], 2],
}


@pytest.mark.parametrize("what", TRAILERS)
def test_hostile_packs(bench: Bench, what: str) -> None:
    with open_store(str(bench.location)) as store:
        packs = store.opened.packs
        pack = packs.find(bytes.fromhex(bench.good.packs[0]))
        path = bench.location / pack.name
        data = path.read_bytes()
        seal = packs.sealer.file(data[:48], pack.name)
        size = _TRAILER.size + 16
        trailer = list(_TRAILER.unpack(seal.open(Box.TRAILER, 0, data[-size:])))
        new = seal.seal(Box.TRAILER, 0, _TRAILER.pack(*TRAILERS[what](trailer)))
        path.write_bytes(data[:-size] + new)
    with open_store(str(bench.location)) as store:
        assert set(check(store).lost) == {bench.good.id}
        with pytest.raises(DamagedError):
            require_same(store, bench.good, bench.ram)
        require_same(store, save(store, bench.ram), bench.ram)
        assert plan_gc(store).damaged
        repair(store, plan_repair(store), remove_lost=True)
        assert check(store).whole


def test_a_pack_of_a_few_bytes_takes_no_memory_for_what_its_table_claims(bench: Bench) -> None:
    """Whoever may add to a store makes one: 64 KiB that claim 2^45 chunks, or 2^32 in one frame."""
    for number, frames in enumerate((1 << 13, 1)):
        claims_chunks(bench, bytes([number]) * 16, frames)
    with open_store(str(bench.location)) as store:
        report = check(store)
        assert {one.name for one in report.findings} == {
            f"packs/{bytes([number]).hex() * 16}-0" for number in range(2)
        }
        assert not report.lost
        require_same(store, bench.good, bench.ram)


def claims_chunks(bench: Bench, pack_id: bytes, frames: int) -> None:
    """A pack, sealed as it has to be, each of whose frames has 2^32 - 1 chunks."""
    with open_store(str(bench.location)) as store:
        packs, name = store.opened.packs, f"packs/{pack_id.hex()}-0"
        header = packs.header.new()
        seal = packs.sealer.file(header, name)
        table = np.array([0] * frames + [0xFFFFFFFF] * frames, dtype="<u4").tobytes()
        hashes = seal.seal(Box.HASHES, 0, b"")
        sealed = seal.seal(Box.TABLE, 0, compress(table, 1))
        numbers = (4096, frames, 1, len(hashes), len(sealed), 0)
        trailer = seal.seal(Box.TRAILER, 0, _TRAILER.pack(*numbers))
        store.opened.files.write(name, [header, hashes, sealed, trailer])


def test_facts_of_any_type_are_unknown_facts() -> None:
    good = CheckpointFacts(
        name="n", host="h", taken_unix_s=1.0, trigger="", tags={}, spec="", platform={},
        qemu_version="", machine={}, firmware=None, memory_bytes=1, disks=(), macs=(),
        pause_ms=1.0, passes=1, took_s=1.0, changed_pages=0,
        group={"id": "g", "name": "n", "members": {"a": "b"}},
    ).to_json()  # fmt: skip
    assert CheckpointFacts.from_json(good).name == "n"
    wrong: list[Any] = [None, [], {}, "text", 5, -1.5, True, [5], [{}], {"a": 1}, {"a": {}}]
    for name in good:
        fitting = 0
        for value in wrong:
            try:
                CheckpointFacts.from_json({**good, name: value})
                fitting += 1
            except UnknownFactsError:
                continue
        assert fitting < 4, name


def test_manifests_are_written_as_they_are_read(bench: Bench) -> None:
    assert Manifest.decode(bench.good.id, bench.good.encode()) == bench.good


TABLES = [
    b"[[1,2]]",
    b'[[["x"],8,0]]',
    b"5",
    b"null",
    b"[" * 100_000,
    b'[["store","a",0]]',
    b'[["store",8,"b"]]',
    b'[["store",8,1.5]]',
    b'[["store",-9,0]]',
    b'[["store",8,-1]]',
    b'[["st\\u001bore",8,0]]',
    b"\xff",
]


@pytest.mark.parametrize("table", TABLES)
def test_hostile_exported_files(tmp_path: Path, table: bytes) -> None:
    """Anyone can make the sum of a table: it is no secret's."""
    size = struct.pack(">Q", len(table))
    body = ARCHIVE + table + size
    (tmp_path / "file").write_bytes(body + blake2b(body, digest_size=32).digest())
    with pytest.raises(DamagedError):
        open_store(str(tmp_path / "file"))


def test_no_time_is_one_that_has_no_date(bench: Bench) -> None:
    """Retention and lists make a date of it."""
    maps = maps_bytes({"base": None, "packs": [], "areas": []})
    with open_store(str(bench.location)) as store:
        for number, when_s in enumerate((3e11, 1e12)):
            words = {**manifest_words(), "created_unix_s": when_s}
            write_checkpoint(store, number, json.dumps(words).encode(), maps)
        last = write_checkpoint(
            store,
            9,
            json.dumps({**manifest_words(), "created_unix_s": LATEST_UNIX_S}).encode(),
            maps,
        )
        found = store.catalogue()
        assert len(found.damaged) == 2
        there = [Candidate(m.id, m.created_unix_s, m.added_bytes) for m in found.manifests]
    assert plan(there, RetentionRule(hourly=1, weekly=1), now_unix_s=1.7e9)[last].keep
    assert time.localtime(LATEST_UNIX_S).tm_year < 9999


HostileMap = Callable[[Store, Manifest], tuple[Refs, int]]


def beyond(store: Store, good: Manifest) -> tuple[Refs, int]:
    return make_refs(0, np.arange(10**6, 10**6 + 5)), PAGE_CHUNK_BYTES


def of_another_size(chunk_bytes: int, pack_bytes: int) -> HostileMap:
    def made(store: Store, good: Manifest) -> tuple[Refs, int]:
        packs = [store.opened.packs.find(bytes.fromhex(pack)) for pack in good.packs]
        [number] = [n for n, p in enumerate(packs) if p.table.chunk_bytes == pack_bytes]
        return make_refs(number, np.arange(4)), chunk_bytes

    return made


HOSTILE_MAPS: dict[str, HostileMap] = {
    "slots that no pack has": beyond,
    "pages of a pack of blocks": of_another_size(PAGE_CHUNK_BYTES, BLOCK_CHUNK_BYTES),
    "blocks of a pack of pages": of_another_size(BLOCK_CHUNK_BYTES, PAGE_CHUNK_BYTES),
    "chunks of a byte": of_another_size(1, PAGE_CHUNK_BYTES),
}


@pytest.mark.parametrize("what", HOSTILE_MAPS)
def test_maps_that_name_what_their_packs_have_not(bench: Bench, what: str) -> None:
    """Check finds it, and it keeps no one from reading, copying and collecting the others."""
    with open_store(str(bench.location)) as store:
        refs, size = HOSTILE_MAPS[what](store, bench.good)
        new = store.opened.files.new_checkpoint("f" * 32)
        facts = AreaFacts("ram", len(refs) * size, size, len(refs), 1, 1)
        hostile = replace(
            bench.good, id="f" * 32, parent=bench.good.id, areas=(facts,), blobs=(), facts={}
        )
        packs = list(map(bytes.fromhex, bench.good.packs))
        maps = Maps(None, packs, {"ram": AreaMap(len(refs) * size, size, refs)})
        new.write(hostile, encode_maps(maps, None))
    with open_store(str(bench.location)) as store:
        assert list(check(store).lost) == [hostile.id]
        with store.read(hostile.id) as point:
            area = point.area("ram")
            for read in (
                lambda: area.read(np.arange(area.chunk_count)),
                lambda: list(area.stream()),
                lambda: area.read_around(0),
            ):
                with pytest.raises(DamagedError):
                    read()
        assert len(store.diff(bench.good.id, hostile.id)["ram"]) > 0
        with create_store(str(bench.folder / "copy")) as target:
            with pytest.raises(DamagedError):
                copy_checkpoints(store, target, store.manifests())
            assert target.ids() == [bench.good.id]
        # gc writes a pack again of which it needs slots that there are not.
        more = save(store, memory(PAGES, 2))
        store.remove([more.id])
        collect(store, plan_gc(store))
        assert repair(store, plan_repair(store), remove_lost=True).removed == [hostile.id]
        require_same(store, bench.good, bench.ram)
        assert check(store).whole


def test_many_areas_that_fit_one_by_one_and_not_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = 1 << 12
    monkeypatch.setattr("vmckpt.store.files.maps._MEMORY_BYTES", 3 * 48 * chunks)
    words = [[f"disk-{number}", chunks * 4096, 4096, 0] for number in range(4)]
    empty = encode(np.zeros(chunks, np.uint64), np.zeros(chunks, np.uint64))
    for word in words:
        word[3] = len(empty)
    hostile = maps_bytes({"base": None, "packs": [], "areas": words}, empty * 4)
    with open_store(str(bench.location)) as store:
        store.maps(bench.good.id)
        one = write_checkpoint(store, 1, json.dumps(manifest_words()).encode(), hostile)
        with pytest.raises(DamagedError, match="cannot be read"):
            store.maps(one)
