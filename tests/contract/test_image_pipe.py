"""A save image in a pipe: read once or twice before the reader that stays, and by one that ends."""

import asyncio
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.waiting import eventually
from vmckpt.errors import StorageError
from vmckpt.vm.domains.loading.image_pipe import ImagePipe, release

pytestmark = pytest.mark.contract
HEAD, REST = b"head" * 25, os.urandom(3 << 20)
# Reads the head so many times, says what it has read, then stays to the end.
READER = """
import hashlib, sys
for _ in range(int(sys.argv[2]) - 1):
    with open(sys.argv[1], "rb", 0) as file:
        print(file.read(100) == b"head" * 25, flush=True)
with open(sys.argv[1], "rb", 0) as file:
    print(file.read(100) == b"head" * 25, flush=True)
    rest = b""
    while more := file.read(65536):
        rest += more
print(hashlib.sha256(rest).hexdigest(), flush=True)
"""


@contextmanager
def reading(path: Path, times: int) -> Iterator["subprocess.Popen[bytes]"]:
    words = [sys.executable, "-c", READER, str(path), str(times)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def has_read(child: "subprocess.Popen[bytes]", pipe: ImagePipe, times: int) -> Callable[[], object]:
    """Whether the reader has come as far as a QEMU that libvirt has started."""
    said = list[bytes]()

    def listen() -> None:
        assert child.stdout
        said.extend(child.stdout.readline() for _ in range(times))

    threading.Thread(target=listen, daemon=True).start()
    return lambda: (len(said) == times and pipe.is_open_in(child.pid)) or None


@pytest.mark.parametrize("times", [1, 2, 3])
def test_the_reader_that_stays_gets_all_of_it_whoever_has_looked_before(
    tmp_path: Path, times: int
) -> None:
    import hashlib

    async def go(child: "subprocess.Popen[bytes]", pipe: ImagePipe) -> None:
        taken = has_read(child, pipe, times)
        assert await asyncio.wait_for(pipe.offer(HEAD, taken), 20)
        await asyncio.to_thread(pipe.write, [REST[:100], REST[100:]])

    with ImagePipe(tmp_path / "image") as pipe:
        assert stat.S_IMODE(pipe.path.stat().st_mode) == 0o600
        with reading(pipe.path, times) as child:
            asyncio.run(go(child, pipe))
            pipe.close()
            assert child.stdout
            assert child.stdout.read().decode().strip() == hashlib.sha256(REST).hexdigest()
    assert not pipe.path.exists()


def test_a_head_of_any_size_waits_for_no_reader(tmp_path: Path) -> None:
    """The XML of a domain with many devices: nobody reads it, as libvirt refuses it."""
    head = os.urandom(900_000)

    async def go(pipe: ImagePipe) -> None:
        taken = iter([None, None, True])
        await asyncio.wait_for(pipe.offer(head, lambda: next(taken)), 20)

    with ImagePipe(tmp_path / "image") as pipe:
        reader = os.open(pipe.path, os.O_RDONLY | os.O_NONBLOCK)
        asyncio.run(go(pipe))
        assert os.read(reader, 1 << 20) == head
        os.close(reader)


def test_a_reader_that_ends_is_noticed(tmp_path: Path) -> None:
    """QEMU could not load the devices, say: nothing waits for it."""

    async def go(child: "subprocess.Popen[bytes]", pipe: ImagePipe) -> None:
        await asyncio.wait_for(pipe.offer(HEAD, has_read(child, pipe, 1)), 20)
        writing = asyncio.ensure_future(asyncio.to_thread(pipe.write, [REST] * 100))
        child.kill()
        with pytest.raises(BrokenPipeError):
            await asyncio.wait_for(writing, 20)

    with ImagePipe(tmp_path / "image") as pipe, reading(pipe.path, 1) as child:
        asyncio.run(go(child, pipe))


@pytest.mark.parametrize("is_opened", [False, True])
def test_nobody_waits_for_a_writer_that_has_died(tmp_path: Path, is_opened: bool) -> None:
    """Libvirt opens it for the second time, or its QEMU reads: with the domain locked."""
    path = tmp_path / "image"
    os.mkfifo(path)
    with subprocess.Popen(["cat", str(path)], stdout=subprocess.DEVNULL) as reader:
        try:
            if is_opened:
                os.close(os.open(path, os.O_WRONLY))

            def given_up() -> bool:
                release(path)
                return reader.poll() is not None and not path.exists()

            eventually(given_up, 20, "its reader to end")
        finally:
            reader.kill()
    release(path)


def test_readers_of_what_remains_incomplete_give_up(tmp_path: Path) -> None:
    """QEMU would poll the end of a pipe for ever: it gets what is no image."""

    async def go(child: "subprocess.Popen[bytes]", pipe: ImagePipe) -> bytes:
        await asyncio.wait_for(pipe.offer(HEAD, has_read(child, pipe, 1)), 20)
        pipe.write([REST[:1000]])
        ending = asyncio.ensure_future(asyncio.sleep(0.2))
        await pipe.spoil(ending)
        pipe.close()
        assert child.stdout
        return await asyncio.to_thread(child.stdout.read)

    with ImagePipe(tmp_path / "image") as pipe, reading(pipe.path, 1) as child:
        assert asyncio.run(go(child, pipe))
    assert not pipe.path.exists()


def test_it_is_closed_while_it_is_written(tmp_path: Path) -> None:
    """The restore was given up: the writer ends with its piece, and its descriptor is closed."""

    async def go(child: "subprocess.Popen[bytes]", pipe: ImagePipe) -> None:
        await asyncio.wait_for(pipe.offer(HEAD, has_read(child, pipe, 1)), 20)
        endless = iter(partial(bytes, 65536), b"")
        writing = asyncio.ensure_future(asyncio.to_thread(pipe.write, endless))
        await asyncio.sleep(0.1)
        assert not writing.done()
        pipe.close()
        await asyncio.wait_for(asyncio.to_thread(child.wait), 20)

    with ImagePipe(tmp_path / "image") as pipe, reading(pipe.path, 1) as child:
        asyncio.run(go(child, pipe))


def test_what_does_not_have_it_is_not_its_reader(tmp_path: Path) -> None:
    with ImagePipe(tmp_path / "image") as pipe:
        other = subprocess.Popen(["sleep", "60"])
        try:
            assert not pipe.is_open_in(other.pid)
        finally:
            other.kill()
            other.wait()
        assert not pipe.is_open_in(other.pid)  # it has ended
        assert pipe.is_open_in(os.getpid())


def test_one_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="create"), ImagePipe(tmp_path / "none/image"):
        time.sleep(0)
