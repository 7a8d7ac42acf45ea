"""Metrics over HTTP and into a file, as Prometheus and node_exporter take them."""

import asyncio
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from vmckpt.cli.nouns.metrics import write
from vmckpt.deadlines import poll
from vmckpt.errors import StorageError
from vmckpt.metrics.serve import MOST_ASKING, MOST_SILENT, serving

pytestmark = pytest.mark.contract


async def asked(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        writer.write_eof()
        return await reader.read()
    finally:  # also of one that was refused
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def test_each_request_gets_what_is_known_then() -> None:
    asyncio.run(ask_several())


async def ask_several() -> None:
    count = 0

    async def collect() -> list[Metric]:
        nonlocal count
        count += 1
        if count == 3:
            raise StorageError("no records", why="the disk is gone", remedy="mend it")
        return [GaugeMetricFamily("vmckpt_asked", "How often.", value=count)]

    async with serving("127.0.0.1", 0, collect) as port:
        get = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"
        first = await asked(port, get)
        head, _, body = first.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 200 OK\r\n")
        assert b"Content-Type: text/plain; version=0.0.4" in head
        assert f"Content-Length: {len(body)}".encode() in head
        assert body.endswith(b"\nvmckpt_asked 1.0\n")
        head_only = await asked(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert head_only.endswith(b"\r\n\r\n")
        failed = await asked(port, get)
        assert failed.startswith(b"HTTP/1.0 500 ")
        assert failed.endswith(b"no records: the disk is gone\n")
        assert (await asked(port, get)).endswith(b"vmckpt_asked 4.0\n")
        assert (await asked(port, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.0 404 ")
        assert (await asked(port, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.0 405 ")
        assert await asked(port, b"\x16\x03\x01 no HTTP") == b""
        long = b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 200
        assert (await asked(port, long)).startswith(b"HTTP/1.0 431 ")
        assert (await asked(port, get)).endswith(b"vmckpt_asked 5.0\n")


def test_who_is_silent_or_hangs_up_keeps_no_one_waiting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vmckpt.metrics.serve._Handler.timeout", 0.2)
    asyncio.run(silence())
    assert capfd.readouterr().err == ""


async def silence() -> None:
    async def collect() -> list[Metric]:
        await asyncio.sleep(0.1)
        return [GaugeMetricFamily("vmckpt_asked", "How often.", value=1)]

    async with serving("localhost", 0, collect) as port:
        silent, writer = await asyncio.open_connection("localhost", port)
        _, gone = await asyncio.open_connection("localhost", port)
        gone.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        gone.transport.abort()
        assert b" 200 OK" in await asked(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert await silent.read() == b""
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("words", [b"", b"GET /metrics HTTP/1.1\r\na: b\r\n"])
def test_who_connects_without_end_takes_no_descriptors_and_no_threads(
    words: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(crowd(words))
    assert capfd.readouterr().err == ""


async def crowd(words: bytes) -> None:
    async def collect() -> list[Metric]:
        return [GaugeMetricFamily("vmckpt_asked", "How often.", value=1)]

    before = threading.active_count()
    async with serving("127.0.0.1", 0, collect) as port:
        others = []
        try:
            for _ in range(200):
                others.append((await asyncio.open_connection("127.0.0.1", port))[1])
                others[-1].write(words)
            assert b" 200 OK" in await asked(port, b"GET /metrics HTTP/1.1\r\n\r\n")
            assert await few(before + MOST_SILENT + 1)
        finally:
            for other in others:
                other.transport.abort()
            assert await few(before + 2)  # that found the address


async def few(most: int) -> bool:
    """Whether so few threads are left, soon."""
    return await poll(lambda: threading.active_count() <= most, every_s=0.01, within_s=5)


def test_no_more_are_answered_at_once_than_there_is_room_for() -> None:
    asyncio.run(asking())


async def asking() -> None:
    go_on = asyncio.Event()

    async def collect() -> list[Metric]:
        await go_on.wait()
        return [GaugeMetricFamily("vmckpt_asked", "How often.", value=1)]

    async with serving("127.0.0.1", 0, collect) as port:
        get = b"GET /metrics HTTP/1.1\r\n\r\n"
        tasks = [asyncio.ensure_future(asked(port, get)) for _ in range(MOST_ASKING)]
        await asyncio.sleep(1)
        assert not any(task.done() for task in tasks)
        with suppress(OSError):
            assert await asked(port, get) == b""
        go_on.set()
        assert all(b" 200 OK" in said for said in await asyncio.gather(*tasks))
        assert b" 200 OK" in await asked(port, get)


def test_a_request_that_waits_when_serving_ends_is_told_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    waiting = socket.socket()
    asyncio.run(end_before(waiting))
    with waiting:
        assert waiting.makefile("rb").read().startswith(b"HTTP/1.0 503 ")
    assert capfd.readouterr().err == ""


async def end_before(waiting: socket.socket) -> None:
    begun = asyncio.Event()

    async def collect() -> list[Metric]:
        begun.set()
        await asyncio.Event().wait()
        return []

    async with serving("127.0.0.1", 0, collect) as port:
        waiting.connect(("127.0.0.1", port))
        waiting.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        await begun.wait()


def test_a_file_is_replaced_in_one_step_and_readable_for_the_exporter(tmp_path: Path) -> None:
    path = tmp_path / "vmckpt.prom"
    write(path, "vmckpt_a 1\n")
    write(path, "vmckpt_a 2\n")
    assert path.read_text() == "vmckpt_a 2\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none" / "vmckpt.prom", "")
    assert [found.name for found in tmp_path.iterdir()] == ["vmckpt.prom"]
