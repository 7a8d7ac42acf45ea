"""The target's RAM file is filled beforehand, and nothing depends on it."""

import asyncio
from pathlib import Path

from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.options import Method, Options
from vmckpt.migrate.populate import Populating, may_fill
from vmckpt.qemu.abilities import Abilities, Agreement, agree
from vmckpt.qemu.replies import QemuVersion

MIB = 1 << 20
NEW = Abilities(
    version=QemuVersion(10, 0, 2),
    machines={},
    cpu_models=frozenset(),
    capabilities=frozenset({"events", "return-path"}),
    compressions=frozenset(),
    parameters=frozenset(),
    commands=frozenset(),
)


async def populated(ram: Path, size_bytes: int, wait_s: float = 10.0) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []
    populating = Populating(lambda code, text: told.append((code, text)))
    populating.start(LocalHost("a", ram.parent, "x"), ram, size_bytes)
    for _ in range(round(wait_s / 0.01)):
        if not ram.exists() or ram.stat().st_blocks * 512 >= size_bytes or told:
            break
        await asyncio.sleep(0.01)
    await populating.stop()
    return told


def test_a_file_of_holes_gets_its_memory_and_keeps_its_size(tmp_path: Path) -> None:
    ram = tmp_path / "ram"
    with ram.open("wb") as file:
        file.truncate(8 * MIB)
        file.seek(MIB)
        file.write(b"page")
    assert asyncio.run(populated(ram, 8 * MIB)) == []
    assert ram.stat().st_blocks * 512 >= 8 * MIB
    assert ram.stat().st_size == 8 * MIB
    assert ram.read_bytes()[MIB : MIB + 4] == b"page"


def test_memory_that_is_elsewhere_gets_no_file(tmp_path: Path) -> None:
    ram = tmp_path / "ram"
    assert asyncio.run(populated(ram, 8 * MIB)) == []
    assert not ram.exists()


def test_what_hinders_it_is_only_told(tmp_path: Path) -> None:
    ram = tmp_path / "ram"
    ram.mkdir()
    told = asyncio.run(populated(ram, 8 * MIB))
    assert [code for code, _ in told] == ["memory"]
    assert "not filled beforehand" in told[0][1]


def test_what_may_come_to_postcopy_is_never_filled() -> None:
    # A page of zeroes that is there already would be taken for one that has come.
    wish = Options(method=Method.HYBRID).wish()
    abilities = NEW._replace(capabilities=NEW.capabilities | {"postcopy-ram"})
    agreed = agree(abilities, abilities, wish)
    assert isinstance(agreed, Agreement)
    assert not may_fill(agreed.capabilities)
    plain = agree(abilities, abilities, Options(method=Method.PRECOPY).wish())
    assert isinstance(plain, Agreement)
    assert may_fill(plain.capabilities)


def test_stopping_comes_at_any_time(tmp_path: Path) -> None:
    async def twice() -> None:
        populating = Populating(lambda *_: None)
        await populating.stop()
        populating.start(LocalHost("a", tmp_path, "x"), tmp_path / "ram", MIB)
        await populating.stop()
        await populating.stop()

    asyncio.run(twice())
