"""Hosts that give no answer while it is asked who has the guest."""

import asyncio
import socket
from pathlib import Path

import pytest

from tests.faulty_host import FaultyHost, silence
from vmckpt.errors import HostDownError
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.outcome import settle as settling
from vmckpt.migrate.outcome.ends import End, Pair
from vmckpt.migrate.outcome.ownership import OwnershipMove
from vmckpt.migrate.outcome.recover import unknown
from vmckpt.qemu.monitor import MonitorLostError
from vmckpt.vm.paths import VmDir


def pair_of(tmp_path: Path) -> Pair:
    """A source that has ended, and a target whose host says nothing."""
    source, target = (
        End(host, VmDir(tmp_path / host.name).qemu("0123abcd"))
        for host in (
            LocalHost("a", tmp_path, "x"),
            FaultyHost("b", tmp_path, "x", faults=silence()),
        )
    )
    return Pair(source, target, was_running=True, ram_dir=tmp_path)


async def kept() -> None:
    """Nothing is written down here."""


def test_a_qemu_that_has_ended_is_told_from_a_host_that_is_down(tmp_path: Path) -> None:
    source, target, *_ = pair_of(tmp_path)
    source.files.path.mkdir(parents=True)
    for path in (source.files.operator, source.files.rescue):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
    for ask in (source.monitor, source.rescue):
        with pytest.raises(MonitorLostError, match=r"the QEMU of .* has ended"):
            asyncio.run(ask())
    for ask in (target.monitor, target.rescue):
        with pytest.raises(HostDownError) as raised:
            asyncio.run(ask())
        assert not isinstance(raised.value, MonitorLostError)


def test_a_look_at_a_silent_host_is_an_answer(tmp_path: Path) -> None:
    view = asyncio.run(pair_of(tmp_path).view())
    assert view.destination.silent
    assert view.destination.alive
    assert not view.source.silent
    assert not view.source.alive


def test_nothing_is_settled_without_it_and_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "SILENT_HOST_S", 0.3)
    monkeypatch.setattr(settling, "SILENT_POLL_S", 0.05)
    told: list[str] = []
    pair = pair_of(tmp_path)
    assert (
        asyncio.run(settling.settle(pair, told.append, kept, timeout_s=0.0))
        is OwnershipMove.UNKNOWN
    )
    assert told == ["b does not answer: asking for 0.3 s"]
    assert "b does not answer" in asyncio.run(unknown(pair)).why


def test_a_failure_is_told_without_the_words_of_a_qemu_whose_host_is_silent(
    tmp_path: Path,
) -> None:
    source, target, *_ = pair_of(tmp_path)
    source.files.path.mkdir(parents=True)
    notice = "qemu-system-x86_64: -mon chardev=a: warning: '-mon' is deprecated, use '-object'\n"
    source.files.stderr.write_text(f"qemu-system-x86_64: Missing section footer\n{notice}")
    assert asyncio.run(source.last_lines()) == "Missing section footer"
    assert asyncio.run(target.last_lines()) == ""
