"""The link between the two hosts of a migration: TLS, one-time certificate, one-time token."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from vmckpt.errors import HostDownError, OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner
from vmckpt.hosts.processes import process
from vmckpt.hosts.remote import tls
from vmckpt.hosts.remote.host import RemoteHost
from vmckpt.hosts.remote.session import Session
from vmckpt.hosts.remote.tls import TlsEndpoint, have_listen, open_link


async def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


@asynccontextmanager
async def listening(tmp_path: Path) -> AsyncIterator[TlsEndpoint]:
    """A host b that listens, ended for certain."""
    there = LocalHost("b", tmp_path / "b", "127.0.0.1")
    directory = tmp_path / "b/jobs/r1"
    try:
        yield await have_listen(there, directory)
    finally:
        await there.remove(directory)
        for left in process.find_by_argument(str(directory)):
            process.kill(left)


def over(place: TlsEndpoint, tmp_path: Path) -> RemoteHost:
    session = Session("b", tmp_path / "b", partial(open_link, "b", place))
    return RemoteHost("b", tmp_path / "b", "127.0.0.1", session=session)


def test_who_has_the_token_is_served_again_and_again(tmp_path: Path) -> None:
    async def play() -> None:
        async with listening(tmp_path) as place:
            host = over(place, tmp_path)
            for text in ("one", "two"):
                await host.write_text(tmp_path / "b/file", text)
                assert (tmp_path / "b/file").read_text() == text
                await host.close()

    asyncio.run(play())


def test_nobody_else_is_served(tmp_path: Path) -> None:
    async def play() -> None:
        async with listening(tmp_path) as place:
            wrong = over(replace(place, token="0" * 64), tmp_path)
            with pytest.raises(HostDownError, match="b does not respond at 127"):
                await wrong.exists(tmp_path)
            # Without TLS not a byte comes back.
            reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
            writer.write(f"{place.token}\n".encode() * 3)
            assert b"vmckpt" not in await reader.read()
            writer.close()
            assert await over(place, tmp_path).exists(tmp_path)

    asyncio.run(play())


def test_strangers_who_say_nothing_use_up_no_descriptors(tmp_path: Path) -> None:
    async def play() -> None:
        async with listening(tmp_path) as place:
            (service,) = process.find_by_argument(str(tmp_path / "b/jobs/r1"))
            before = len(os.listdir(f"/proc/{service.pid}/fd"))
            idle = [
                await asyncio.open_connection("127.0.0.1", place.port)
                for _ in range(5 * tls.MOST_STRANGERS)
            ]
            assert await over(place, tmp_path).exists(tmp_path)
            open_now = len(os.listdir(f"/proc/{service.pid}/fd")) - before
            assert open_now <= tls.MOST_STRANGERS + 4
            for _, writer in idle:
                writer.transport.abort()

    asyncio.run(play())


def test_another_listener_gets_no_token(tmp_path: Path) -> None:
    async def play() -> None:
        async with listening(tmp_path) as place:
            other = over(replace(place, fingerprint="0" * 64), tmp_path)
            with pytest.raises(HostDownError, match="is not b"):
                await other.exists(tmp_path)

    asyncio.run(play())


def test_what_it_was_told_is_in_no_file_while_it_listens(tmp_path: Path) -> None:
    async def play() -> None:
        async with listening(tmp_path) as place:
            files = [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
            assert files
            for path in files:
                assert path.stat().st_mode & 0o077 == 0
                assert place.token not in path.read_text()
                assert "PRIVATE KEY" not in path.read_text()

    asyncio.run(play())


def test_it_ends_when_its_directory_is_removed_and_nobody_is_there(tmp_path: Path) -> None:
    async def play() -> None:
        async with listening(tmp_path) as place:
            host = over(place, tmp_path)
            await host.remove(tmp_path / "b/jobs/r1")
            await asyncio.sleep(1.5)
            assert await host.exists(tmp_path), "whoever is there is served on"
            await host.close()
            mark = str(tmp_path / "b/jobs/r1")
            await until(lambda: not process.find_by_argument(mark), "it ends")

    asyncio.run(play())


def test_who_stays_after_its_end_is_put_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "SILENCE_S", 1.0)
    directory = tmp_path / "b/jobs/r1"
    directory.mkdir(parents=True)
    asked = {"address": "127.0.0.1", "first": 0, "last": 0, "token": "ab"}
    (directory / "link.json").write_text(json.dumps(asked))

    async def play() -> None:
        listener = asyncio.create_task(tls.listen(directory, tmp_path / "b"))
        await until((directory / "listens.json").exists, "it listens")
        said = json.loads((directory / "listens.json").read_text())
        host = over(TlsEndpoint("127.0.0.1", said["port"], said["fingerprint"], "ab"), tmp_path)
        held = host.lock(tmp_path / "b/locks/web", Owner("r", "migrate to b", 1, 1.0))
        await held.__aenter__()
        await host.remove(directory)
        await asyncio.wait_for(listener, 20)
        assert await LocalHost("b", tmp_path, "x").lock_owner(tmp_path / "b/locks/web") is None
        with pytest.raises(HostDownError, match="cannot reach b"):
            await host.exists(tmp_path)
        await held.__aexit__(None, None, None)

    asyncio.run(play())


def test_ports_are_taken_in_turn_and_an_end_of_them_is_told(tmp_path: Path) -> None:
    async def play() -> None:
        async with listening(tmp_path) as first:
            here = LocalHost("c", tmp_path / "c", "127.0.0.1",
                             migration_ports=(first.port, first.port))  # fmt: skip
            with pytest.raises(OperationFailedError, match="c does not listen") as caught:
                await have_listen(here, tmp_path / "c/jobs/r1")
            assert "in use" in caught.value.why
            assert not (tmp_path / "c/jobs/r1").exists()

    asyncio.run(play())


def test_a_link_to_nobody_says_where(tmp_path: Path) -> None:
    async def play() -> None:
        place = TlsEndpoint("127.0.0.1", 1, "0" * 64, "0" * 64)
        with pytest.raises(HostDownError, match=r"cannot reach b at 127\.0\.0\.1 port 1"):
            await over(place, tmp_path).exists(tmp_path)

    asyncio.run(play())
