"""Metrics over HTTP and into a file, as Prometheus and node_exporter take them."""

import asyncio
import stat
from pathlib import Path

import pytest

from vmckpt.cli.metrics import write
from vmckpt.errors import StorageError
from vmckpt.metrics.serve import serving

pytestmark = pytest.mark.contract


async def asked(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def test_each_request_gets_what_is_known_then() -> None:
    asyncio.run(ask_several())


async def ask_several() -> None:
    count = 0

    async def collect() -> str:
        nonlocal count
        count += 1
        if count == 3:
            raise StorageError("no records", why="the disk is gone", remedy="mend it")
        return f"vmckpt_asked_total {count}\n"

    async with serving("127.0.0.1", 0, collect) as port:
        get = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"
        first = await asked(port, get)
        head, _, body = first.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Type: text/plain; version=0.0.4" in head
        assert b"Content-Length: 21" in head
        assert body == b"vmckpt_asked_total 1\n"
        head_only = await asked(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert head_only.endswith(b"\r\n\r\n")
        assert (await asked(port, get)).startswith(b"HTTP/1.1 500 ")
        assert (await asked(port, get)).endswith(b"vmckpt_asked_total 4\n")
        assert (await asked(port, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert (await asked(port, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        assert await asked(port, b"\x16\x03\x01 no HTTP") == b""
        assert await asked(port, b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 200) == b""
        assert (await asked(port, get)).endswith(b"vmckpt_asked_total 5\n")


def test_a_file_is_replaced_in_one_step_and_readable_for_the_exporter(tmp_path: Path) -> None:
    path = tmp_path / "vmckpt.prom"
    write(path, "vmckpt_a 1\n")
    write(path, "vmckpt_a 2\n")
    assert path.read_text() == "vmckpt_a 2\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none" / "vmckpt.prom", "")
    assert [found.name for found in tmp_path.iterdir()] == ["vmckpt.prom"]
