"""Bytes that were written once, and have to be understood in every version: see tests/golden.

The files there are stores with two checkpoints each, as `export` made them: store-1 has format 1,
store-2 format 2 (several keys). store-3 has directories of format 3, with their packs in a bundle.
They are never made again: a new format gets files of its own beside them.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from vmckpt.store.backends.archive import ArchiveBackend
from vmckpt.store.check import check
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.config import Config
from vmckpt.store.files.header import HEADER_BYTES, FileKind, Header
from vmckpt.store.files.maps import decode, make_refs
from vmckpt.store.open import open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource
from vmckpt.store.sealing.seal import Box, Sealer

GOLDEN = Path(__file__).parents[1] / "golden" / "store-1"
SEVERAL_KEYS = GOLDEN.parent / "store-2" / "several.vmckpt"
MERGED = GOLDEN.parent / "store-3"
KEY = b"vmckpt-key-1:" + b"0123456789abcdef" * 4 + b"\n"
OTHER_KEY = b"vmckpt-key-1:" + b"fedcba9876543210" * 4 + b"\n"
SECRET = bytes(range(32))
STORE_ID, SALT = bytes(16), bytes([7] * 16)


def first_state() -> NDArray[np.uint8]:
    """Six pages: zeroes, two alike, text, and what looks like noise."""
    ram = np.zeros((6, 4096), dtype=np.uint8)
    ram[1:3] = 1
    ram[3] = np.frombuffer(b"vmckpt  " * 512, dtype=np.uint8)
    noise = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(128))
    ram[4] = np.frombuffer(noise, dtype=np.uint8)
    return ram


def second_state() -> NDArray[np.uint8]:
    """The same later: a page became zeroes, another one text."""
    ram = first_state()
    ram[1] = 0
    ram[5] = np.frombuffer(b"changed " * 512, dtype=np.uint8)
    return ram


@pytest.mark.parametrize("kind", ["clear", "encrypted"])
def test_a_store_of_format_1_is_read(kind: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    source = KeySource(KeyHolder.FILE, str(key)) if kind == "encrypted" else None
    _require_golden(GOLDEN / f"{kind}.vmckpt", source)


@pytest.mark.parametrize("text", [KEY, OTHER_KEY, b"a passphrase\n"])
def test_a_store_of_format_2_is_read_with_each_of_its_keys(text: bytes, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(text)
    key.chmod(0o600)
    _require_golden(SEVERAL_KEYS, KeySource(KeyHolder.FILE, str(key)))


@pytest.mark.parametrize("kind", ["clear", "encrypted"])
def test_a_store_of_format_3_is_read(kind: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    location = tmp_path / "store"
    shutil.copytree(MERGED / kind, location)
    _require_golden(location, KeySource(KeyHolder.FILE, str(key)) if kind == "encrypted" else None)
    assert not (location / "packs").exists()


def test_a_vmckpt_without_bundles_finds_the_number_of_format_3() -> None:
    """In what a25fa57 looks at: see below."""
    for name in ("store", "config/1", "config/2"):
        data = (MERGED / "clear" / name).read_bytes()
        words = json.loads(data.partition(b"\n")[0])["vmckpt-store"]
        assert set(words) == {"id", "created_unix_s", "key", "format"}
        assert words["format"] == 3


def test_a_bundle_is_what_docs_say(tmp_path: Path) -> None:
    """Taken apart by docs/store.md alone: each pack comes out as it was."""
    [path] = (MERGED / "clear" / "bundles").iterdir()
    data, name = path.read_bytes(), f"bundles/{path.name}"
    assert data[:10] == b"\x89VMCKPT\n\x00\x01"
    assert data[10:12] == b"B\x00"
    header, length = data[:48], int.from_bytes(data[48:52])
    words = json.loads((MERGED / "clear" / "store").read_bytes().partition(b"\n")[0])
    secret = bytes.fromhex(words["vmckpt-store"]["key"]["secret"])
    seal = Sealer(secret, encrypted=False).file(header, name)
    text = zstandard.decompress(seal.open(Box.LIST, 0, data[52 : 52 + length]))
    assert data[-52:] == data[:52]
    assert zstandard.decompress(seal.open(Box.LIST, 1, data[-52 - length : -52])) == text
    rows = json.loads(text)
    tails_at = 52 + length
    frames_at = tails_at + sum(size - frames for _, _, size, frames in rows)
    for pack_id, generation, size, frames in rows:
        tail = data[tails_at : tails_at + size - frames]
        pack = tail[:48] + data[frames_at : frames_at + frames] + tail[48:]
        tails_at, frames_at = tails_at + len(tail), frames_at + frames
        assert len(pack) == size
        assert pack[:12] == b"\x89VMCKPT\n\x00\x01P\x00"
        seal = Sealer(secret, encrypted=False).file(pack[:48], f"packs/{pack_id}-{generation}")
        seal.open(Box.TRAILER, 0, pack[-40:])
    assert frames_at == len(data) - 52 - length


def test_a_vmckpt_of_one_key_finds_the_number_of_format_2() -> None:
    """What a25fa57 looks at, in this order, before it says which format it does not know."""
    data = ArchiveBackend(SEVERAL_KEYS).read("store")
    line, _, _ = data.partition(b"\n")
    words = json.loads(line)["vmckpt-store"]
    assert set(words) == {"id", "created_unix_s", "key", "format"}
    checksum = hashlib.blake2b(line, digest_size=32).hexdigest().encode()
    assert data == line + b"\n" + checksum + b"\n"
    assert line == json.dumps({"vmckpt-store": words}, sort_keys=True).encode()
    assert words["format"] == 2


def _require_golden(path: Path, source: KeySource | None) -> None:
    with open_store(str(path), source) as store:
        first, second = store.manifests()
        assert (first.facts, second.facts) == ({"name": "state-1"}, {"name": "state-2"})
        assert (first.vm, first.parent, second.parent) == ("golden", None, first.id)
        assert (first.created_unix_s, second.created_unix_s) == (1.5e9, 1.5e9 + 1)
        for manifest, ram in ((first, first_state()), (second, second_state())):
            with store.read(manifest.id) as point:
                assert bytes(point.area("ram").read(np.arange(6))) == ram.tobytes()
                disk = point.area("disk-0")
                assert (disk.size_bytes, disk.chunk_count) == (200_000, 4)
                assert disk.numbers().tolist() == [2]
                assert bytes(disk.read(np.array([2]))) == b"d" * 65536
                assert point.blob("device-state") == b"devices"
        assert check(store).whole


def test_the_header() -> None:
    made = Header(FileKind.PACK, True, STORE_ID)
    data = bytes.fromhex("89564d434b50540a0001500100000000") + STORE_ID + SALT
    assert len(data) == HEADER_BYTES
    assert made.read(data + b"more", "packs/x") == data
    assert made.new()[:32] == data[:32]
    with pytest.raises(DamagedError, match="format 2"):
        made.read(data[:9] + b"\x02" + data[10:], "packs/x")
    for other in (
        Header(FileKind.MAPS, True, STORE_ID),
        Header(FileKind.PACK, False, STORE_ID),
        Header(FileKind.PACK, True, SALT),
    ):
        with pytest.raises(DamagedError, match="not what was written"):
            other.read(data, "packs/x")
    with pytest.raises(DamagedError):
        made.read(data[:-1], "packs/x")


@pytest.mark.parametrize(
    ("encrypted", "expected"),
    [
        (False, "612070616765e1d507e3e3f492d09ee1d3d30a2e5642"),
        (True, "4e8a027e8ea45d6fc445515bb254846417f4feb49a57"),
    ],
)
def test_a_box(encrypted: bool, expected: str) -> None:
    sealer = Sealer(SECRET, encrypted=encrypted)
    header = Header(FileKind.PACK, encrypted, STORE_ID)
    seal = sealer.file(header.read(header.new()[:32] + SALT, "packs/x"), "packs/x")
    box = bytes.fromhex(expected)
    assert seal.seal(Box.FRAME, 3, b"a page").hex() == expected
    assert seal.open(Box.FRAME, 3, box) == b"a page"
    # In no other place.
    for kind, number in ((Box.FRAME, 4), (Box.TABLE, 3)):
        with pytest.raises(DamagedError):
            seal.open(kind, number, box)
    elsewhere = sealer.file(header.new()[:32] + SALT, "packs/y")
    for data in (box[:-1], b"", box[:5] + b"x" + box[6:]):
        with pytest.raises(DamagedError):
            seal.open(Box.FRAME, 3, data)
    with pytest.raises(DamagedError):
        elsewhere.open(Box.FRAME, 3, box)


def test_names_of_chunks() -> None:
    names = Sealer(SECRET, encrypted=False).hashes(memoryview(bytes(4096) + b"\x01" * 4096), 4096)
    assert names.hex() == "fe9e8eb1c22324643166809ba906c614eaa824f179316aaeb049ff24a93f811d"


def test_a_map() -> None:
    data = bytes.fromhex("28b52ffd20209d0000580204040201020e420002000200a0e3011c01")
    refs = decode(data, np.zeros(20, dtype=np.uint64), "x", 2)
    expected = np.zeros(20, dtype=np.uint64)
    expected[2:6] = make_refs(0, np.arange(7, 11))
    expected[10:12] = make_refs(1, np.arange(300, 302))
    assert refs.tolist() == expected.tolist()


def test_the_config() -> None:
    config = Config("00" * 16, 1500000000, {"kind": "clear", "secret": "11" * 32})
    line = (
        b'{"vmckpt-store": {"created_unix_s": 1500000000, "format": 1, "id": "'
        + b"00" * 16
        + b'", "key": {"kind": "clear", "secret": "'
        + b"11" * 32
        + b'"}}}'
    )
    total = hashlib.blake2b(line, digest_size=32).hexdigest().encode()
    assert config.encode() == line + b"\n" + total + b"\n"
