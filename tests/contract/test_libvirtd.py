"""Sessions with libvirt: its own test driver answers, and sockets that do not."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
)
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.forward import NAME, forwarded
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd

pytestmark = pytest.mark.contract
UNKNOWN = "00000000-0000-0000-0000-000000000001"


def with_test_driver(use: Callable[[Libvirtd], Awaitable[None]]) -> None:
    """Libvirt's test driver lives in this process, and each session has one of its own."""

    async def main() -> None:
        session = Libvirtd("test:///default", LocalHost("a", Path("/"), "::1"))
        await session.open()
        try:
            await use(session)
        finally:
            await session.close()

    asyncio.run(main())


def test_a_domain_is_found_ended_and_started() -> None:
    async def use(session: Libvirtd) -> None:
        [seen] = await session.domains()
        assert (seen.name, seen.state, seen.persistent) == ("test", DomainState.RUNNING, True)
        assert seen.xml.startswith("<domain")
        await session.destroy(seen.uuid)
        found = await session.find(seen.uuid)
        assert found
        assert found.state is DomainState.SHUTOFF
        await session.start(seen.uuid)
        with pytest.raises(LibvirtRefusedError) as caught:
            await session.start(seen.uuid)
        assert caught.value.why
        assert caught.value.remedy
        assert await session.find(UNKNOWN) is None
        assert await session.condition(UNKNOWN) is None
        assert await session.condition(seen.uuid) == (DomainState.RUNNING, 1)
        with pytest.raises(NotFoundError):
            await session.start(UNKNOWN)

    with_test_driver(use)


def test_a_call_that_gets_no_thread_is_one_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the migration that it watches would go on, held back and unwatched."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def use(session: Libvirtd) -> None:
        [seen] = await session.domains()
        before = await session.condition(seen.uuid)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(HostDownError, match="did not answer"):
                await session.job(seen.uuid)
            with pytest.raises(OutcomeUnknownError):
                await session.destroy(seen.uuid)
            with pytest.raises(HostDownError, match="does not answer"):
                await Libvirtd("test:///default", session.host).open()
        assert before is not None and before.state is DomainState.RUNNING
        assert await session.condition(seen.uuid) == before

    with_test_driver(use)


def test_memory_that_libvirt_has_saved_is_told_of() -> None:
    async def use(session: Libvirtd) -> None:
        [seen] = await session.domains()
        assert not await session.has_saved_memory(seen.uuid)
        await session._ask("save it", lambda: session._domain(seen.uuid).managedSave(0))
        assert await session.has_saved_memory(seen.uuid)

    with_test_driver(use)


def test_snapshots_are_taken_listed_and_deleted() -> None:
    async def use(session: Libvirtd) -> None:
        [seen] = await session.domains()
        xml = "<domainsnapshot><name>one</name></domainsnapshot>"
        assert (await session.save_snapshot(seen.uuid, xml)).name == "one"
        assert [snapshot.name for snapshot in await session.snapshots(seen.uuid)] == ["one"]
        await session.load_snapshot(seen.uuid, "one")
        await session.delete_snapshot(seen.uuid, "one")
        assert await session.snapshots(seen.uuid) == []

    with_test_driver(use)


def test_a_call_that_nobody_waits_for_any_more_still_keeps_the_next_back() -> None:
    """Libvirt's client before 10.0 dies of two at a time whose connection is lost."""
    answers, late = threading.Event(), threading.Event()

    async def use(session: Libvirtd) -> None:
        with pytest.raises(HostDownError):
            await session._ask("be silent", answers.wait, 0.05)
        with pytest.raises(HostDownError):
            await session._ask("wait for its turn", late.set, 0.05)
        answers.set()
        assert await session._ask("answer", answers.is_set)
        assert not late.is_set()

    with_test_driver(use)


def test_networks_are_there_or_not() -> None:
    async def use(session: Libvirtd) -> None:
        assert await session.has_network("default")
        assert not await session.has_network("other")

    with_test_driver(use)


def host(socket_path: Path | None) -> LocalHost:
    return LocalHost("a", Path("/tmp"), "127.0.0.1", libvirt=socket_path)


async def _ask(at: LocalHost) -> None:
    async with libvirtd(at) as session:
        await session.domains()


def test_a_host_without_libvirtd_is_told_apart_from_one_that_is_silent(tmp_path: Path) -> None:
    with pytest.raises(RefusedError):
        asyncio.run(_ask(host(None)))
    with pytest.raises(HostDownError):
        asyncio.run(_ask(host(tmp_path / "missing")))


def test_whoever_hangs_up_at_once_is_no_libvirtd(tmp_path: Path) -> None:
    async def main() -> None:
        def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        path = tmp_path / "sock"
        async with await asyncio.start_unix_server(hang_up, path):
            await _ask(host(path))

    with pytest.raises(HostDownError) as caught:
        asyncio.run(main())
    assert "libvirtd of a" in caught.value.what


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data.upper())
    writer.close()


def test_the_forwarder_carries_both_ways_and_is_found_by_this_process_alone(tmp_path: Path) -> None:
    # Longer than a socket's path may be, and not there yet.
    mine = tmp_path / ("long-" * 30)

    async def main() -> Path:
        far = tmp_path / "far"
        async with (
            await asyncio.start_unix_server(shout, far),
            forwarded(host(far), far, mine) as near,
            forwarded(host(far), far, mine) as other,
        ):
            assert list(mine.iterdir()) == []
            for path in (near, other):
                reader, writer = await asyncio.open_unix_connection(path)
                for text in (b"one", b"two"):
                    writer.write(text)
                    assert await reader.read(100) == text.upper()
                writer.write_eof()
                assert await reader.read(100) == b""
                writer.close()
            left_open = socket.socket(socket.AF_UNIX)
            left_open.connect(str(near))
        left_open.close()
        return near

    near = asyncio.run(main())
    assert near.parent == Path("/proc/self/fd")
    assert not near.exists()
    assert list(mine.iterdir()) == []


def test_what_a_killed_forwarder_left_goes_with_the_next(tmp_path: Path) -> None:
    """The moment in which its socket has a name; nothing that is killed later leaves any."""
    mine, far = tmp_path / "mine", tmp_path / "far"
    mine.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(mine / NAME))

    async def main() -> None:
        async with (
            await asyncio.start_unix_server(shout, far),
            forwarded(host(far), far, mine),
        ):
            assert list(mine.iterdir()) == []

    asyncio.run(main())


def test_where_no_socket_can_be_made_the_error_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        far = tmp_path / "far"
        async with (
            await asyncio.start_unix_server(shout, far),
            forwarded(host(far), far, far),
        ):
            pass

    with pytest.raises(StorageError, match="cannot make a socket"):
        asyncio.run(main())
