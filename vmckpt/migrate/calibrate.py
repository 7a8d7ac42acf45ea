"""Measure what a migration between two hosts costs, by moving a small guest there and back.

The guest is firmware alone. Its memory is filled from outside, through its RAM file: with nothing,
with noise, and with text, which compresses. Each move leaves a run record like any other, and the
planner learns from those.
"""

import random
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.events.record import load_all
from vmckpt.events.types import Emit, Event, PhaseBegan
from vmckpt.forecast.learned import CALIBRATION, learned
from vmckpt.forecast.model.link import LinkModel
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.directories import runs_dir
from vmckpt.migrate.elsewhere.delegate import migrate_there
from vmckpt.migrate.run import migrate
from vmckpt.options.migration import DEFAULT_CHANNELS, Method, MigrationOptions
from vmckpt.preflight.migration.checks import preflight
from vmckpt.sequence.steps import to_the_end
from vmckpt.units import MIB
from vmckpt.vm.create import run_vm
from vmckpt.vm.inventory import Vm, find_vm, homes
from vmckpt.vm.lifecycle import remove_vm, stop_vm
from vmckpt.vm.spec.spec import parse_spec

# Below it the firmware may have its own data.
FIRST_MIB = 16
LEAST_BYTES = 64 * MIB
# The text written to the host and repeated in memory: longer than zstd's window.
TEXT_BYTES, WORDS, WORD_BYTES = 4 * MIB, 4096, 15
_RECORDS = re.compile(r"^([0-9]{1,15})\+([0-9]{1,15}) records out$", re.MULTILINE)


class Fill(NamedTuple):
    """The share of memory filled with the content of a file on the host (None: nothing)."""

    part: float
    source: str | None


class Lap(NamedTuple):
    """One move there and back; `words` describe what is moved, and how."""

    words: str
    fill: Fill
    options: MigrationOptions


NOISE = "/dev/urandom"
PLAIN = MigrationOptions(method=Method.PRECOPY)
PARALLEL = MigrationOptions(method=Method.PRECOPY, channels=DEFAULT_CHANNELS)
COMPRESSED = MigrationOptions(method=Method.PRECOPY, compression="zstd")


class Calibration(NamedTuple):
    """The result, by direction; `skipped` says why laps were left out."""

    there: dict[str, LinkModel]
    back: dict[str, LinkModel]
    moves: int
    skipped: tuple[str, ...]


async def calibrate(first: Host, second: Host, memory_bytes: int, emit: Emit) -> Calibration:
    """Move a guest of `memory_bytes` between the hosts until both directions are measured.

    The guest is removed afterwards. Raises RefusedError if no guest can move between the two.
    """
    if first.name == second.name:
        raise RefusedError(
            "a host is not calibrated with itself",
            why="calibrating needs two hosts",
            remedy="vmckpt host calibrate A B",
        )
    began_s, moves, skipped = time.monotonic(), 0, list[str]()
    # In the same way as their real migrations.
    elsewhere = not (first.is_this_machine or second.is_this_machine)
    move = migrate_there if elsewhere else migrate
    async with _text(first) as text, _guest(first, memory_bytes) as name:
        for lap in _laps(text):
            vm = await find_vm(name)
            checked = await preflight(vm, second, lap.options)
            if not checked.possible and lap.options != PLAIN:
                skipped.append("; ".join(c.reason for c in checked.checks if c.remedy))
                continue
            await _fill(vm, lap.fill)
            for source, destination in ((first, second), (second, first)):
                now_s = time.monotonic() - began_s
                emit(PhaseBegan(now_s, f"{source.name} to {destination.name}: {lap.words}"))
                await move(await find_vm(name), destination, lap.options, _as_one(emit, now_s))
                moves += 1
    records = load_all(runs_dir())
    return Calibration(
        learned(records, first.name, second.name),
        learned(records, second.name, first.name),
        moves,
        tuple(skipped),
    )


def _as_one(emit: Emit, began_s: float) -> Emit:
    """Report a move as one step of a longer operation, without its own steps."""

    def later(event: Event) -> None:
        if not isinstance(event, PhaseBegan):
            emit(event._replace(at_s=began_s + event.at_s))

    return later


def _laps(text: Path) -> list[Lap]:
    """Each content, over each method with a different cost."""
    some, much = (Fill(part, NOISE) for part in (0.4, 0.9))
    return [
        Lap("empty", Fill(0.0, None), PLAIN),
        Lap("40 % noise", some, PLAIN),
        Lap("40 % noise, over several channels", some, PARALLEL),
        Lap("40 % noise, compressed", some, COMPRESSED),
        Lap("40 % text, compressed", Fill(0.4, str(text)), COMPRESSED),
        Lap("90 % noise", much, PLAIN),
        Lap("90 % noise, over several channels", much, PARALLEL),
        Lap("90 % text, compressed", Fill(0.9, str(text)), COMPRESSED),
    ]


@asynccontextmanager
async def _text(host: Host) -> AsyncIterator[Path]:
    """A file of words on `host`, for the block."""
    path = host.state_dir / f"{CALIBRATION}{secrets.token_hex(3)}.txt"
    await host.write_text(path, words())
    try:
        yield path
    finally:
        await to_the_end(host.remove(path))


def words() -> str:
    """A few thousand words in random order, the same each time: zstd compresses them to a
    quarter.
    """
    letters = random.Random(1)
    known = [f"{letters.randbytes(WORD_BYTES // 2 + 1).hex()[:WORD_BYTES]} " for _ in range(WORDS)]
    return "".join(letters.choices(known, k=TEXT_BYTES // (WORD_BYTES + 1)))


@asynccontextmanager
async def _guest(host: Host, memory_bytes: int) -> AsyncIterator[str]:
    """An idle guest on `host`, for the block; its name."""
    name = f"{CALIBRATION}{secrets.token_hex(3)}"
    text = f'name = "{name}"\nmemory = "{memory_bytes}"\n'
    spec = parse_spec(text, "the calibration guest", host.state_dir)
    await run_vm(spec, host)
    try:
        yield name
    finally:
        await to_the_end(_remove(name))


async def _remove(name: str) -> None:
    for vm in await homes(name):
        await stop_vm(vm, force=True, timeout_s=0.0)
        await remove_vm(vm)


async def _fill(vm: Vm, fill: Fill) -> None:
    """Fill the guest's memory up to its share by repeating a file's content."""
    if fill.source is None:
        return
    ram = vm.qemu.files.ram(vm.spec.ram_dir)
    at_mib, end_mib = FIRST_MIB, int(vm.spec.memory_bytes / MIB * fill.part)
    while at_mib < end_mib:
        argv = [
            "env", "LC_ALL=C", "dd", f"if={fill.source}", f"of={ram}", "bs=1M", f"seek={at_mib}",
            f"count={end_mib - at_mib}", "conv=notrunc", "iflag=fullblock",
        ]  # fmt: skip
        done = await vm.host.run(argv)
        copied = _copied_mib(done.stderr)
        if done.returncode or not copied:
            raise OperationFailedError(
                f"the calibration guest's memory on {vm.host.name} cannot be filled",
                why=done.stderr.strip(),
                remedy=f"check that dd is installed there, and the permissions of {ram}",
            )
        at_mib += copied


def _copied_mib(words: str) -> int:
    """Parse dd's `3+1 records out`: blocks of 1 MiB, including a partial one."""
    found = _RECORDS.search(words)
    return int(found[1]) + int(found[2]) if found else 0
