"""What the test guest says, as types; and the numbers that prove a connection whole."""

import asyncio
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.lab.guests.guest import GuestControl, KvClient
from vmckpt.lab.guests.replies import (
    ContinuityError,
    DiskCheck,
    GuestRefusedError,
    GuestSilentError,
    GuestStat,
    MemCheck,
    MemLoad,
    parse_fields,
    parse_numbered,
    parse_reply,
)

pytestmark = pytest.mark.unit

# Word for word what a guest said.
MEM_CHECK = "ok pages=32768 wrong=0 sum_right=1 errors=0 touches=8286020 took_ms=596"
DISK_CHECK = "ok records=16371 wrong=0 first_wrong=0 seq=46304 errors=0 took_ms=158"
MEM_LOAD = "ok pages=16384 rate=20971520 pattern=uniform content=random touch=line"
STAT = (
    "ok boot=33c6b569-4426-4e02-86e2-938d384ba503 uptime_ms=2108 connections=2 requests=1"
    " mem_pages=0 mem_rate=0 mem_touches=0 mem_checked=0 mem_errors=0 disk_slots=16384"
    " disk_rate=2097152 disk_seq=16 disk_errors=0 heartbeat_seq=13 heartbeat_refused=0"
)


def test_replies_become_types() -> None:
    assert parse_reply(MemCheck, "mem verify", MEM_CHECK) == MemCheck(
        pages=32768, wrong=0, sum_right=True, errors=0, touches=8286020, took_ms=596
    )
    assert parse_reply(DiskCheck, "disk verify", DISK_CHECK).seq == 46304
    assert parse_reply(MemLoad, "mem", MEM_LOAD).content == "random"
    stat = parse_reply(GuestStat, "stat", STAT)
    assert stat.boot.startswith("33c6b569")
    assert (stat.heartbeat_seq, stat.disk_rate) == (13, 2 << 20)


def test_a_check_is_sound_only_when_nothing_was_ever_wrong() -> None:
    check = parse_reply(MemCheck, "mem verify", MEM_CHECK)
    assert check.sound
    assert not dataclasses.replace(check, wrong=1).sound
    assert not dataclasses.replace(check, errors=1).sound
    assert not dataclasses.replace(check, sum_right=False).sound
    disk = parse_reply(DiskCheck, "disk verify", DISK_CHECK)
    assert disk.sound
    assert not dataclasses.replace(disk, wrong=1).sound
    assert not dataclasses.replace(disk, errors=1).sound


def test_a_guest_may_say_more_than_is_known() -> None:
    assert parse_reply(DiskCheck, "disk verify", f"{DISK_CHECK} colour=blue and so on").wrong == 0


def test_error_carries_the_guests_words() -> None:
    with pytest.raises(GuestRefusedError) as caught:
        parse_fields("mem set=1T", "error mem: set is larger than 90% of the free memory (387 MiB)")
    assert caught.value.why == "mem: set is larger than 90% of the free memory (387 MiB)"
    assert "mem set=1T" in caught.value.what


@pytest.mark.parametrize("line", ["", "okay", "VK-READY", "HTTP/1.1 400 Bad Request"])
def test_another_protocol_is_not_taken_for_a_reply(line: str) -> None:
    with pytest.raises(GuestSilentError):
        parse_fields("ping", line)


@pytest.mark.parametrize("line", ["ok", "ok pages=1", MEM_CHECK.replace("wrong=0", "wrong=x")])
def test_a_missing_or_unreadable_field_is_no_zero(line: str) -> None:
    with pytest.raises(GuestSilentError):
        parse_reply(MemCheck, "mem verify", line)


@given(st.integers(1, 10**12), st.integers(1, 10**12), st.text("ab =\t", max_size=20))
def test_only_the_expected_number_passes(expected: int, said: int, value: str) -> None:
    if said == expected:
        assert parse_numbered("get k", f"ok {said} {value}", expected=expected) == value
        return
    with pytest.raises(ContinuityError):
        parse_numbered("get k", f"ok {said} {value}", expected=expected)


def test_a_refusal_out_of_order_is_a_broken_connection_first() -> None:
    with pytest.raises(GuestRefusedError):
        parse_numbered("get k", "error 3 no such key", expected=3)
    with pytest.raises(ContinuityError):
        parse_numbered("get k", "error 4 no such key", expected=3)


class Script(asyncio.Transport):
    """The other end of a connection: it answers from a list, and closes after the last line."""

    def __init__(self, reader: asyncio.StreamReader, *lines: str) -> None:
        super().__init__()
        self._reader, self._lines = reader, list(lines)
        self.protocol = asyncio.StreamReaderProtocol(reader)
        self.heard: list[str] = []
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.heard.append(bytes(data).decode())
        if self._lines:
            self._reader.feed_data(f"{self._lines.pop(0)}\n".encode())
        else:
            self._reader.feed_eof()

    def close(self) -> None:
        self._closed = True
        self.protocol.connection_lost(None)

    def is_closing(self) -> bool:
        return self._closed


def scripted(*lines: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Script]:
    reader = asyncio.StreamReader()
    script = Script(reader, *lines)
    writer = asyncio.StreamWriter(script, script.protocol, reader, asyncio.get_running_loop())
    return reader, writer, script


def test_control_sends_the_words_and_reads_the_reply() -> None:
    async def talk() -> None:
        reader, writer, script = scripted(MEM_LOAD, MEM_CHECK, "ok seq=9 hz=1000")
        control = GuestControl(reader, writer)
        assert (await control.load_memory("rate=20M set=64M")).pages == 16384
        assert (await control.verify_memory()).sound
        await control.beat("10.77.0.254:7700")
        assert script.heard == [
            "mem rate=20M set=64M\n",
            "mem verify\n",
            "heartbeat dest=10.77.0.254:7700 hz=1000\n",
        ]
        await control.close()

    asyncio.run(talk())


def test_after_a_silence_the_connection_stays_broken() -> None:
    async def talk() -> None:
        control = GuestControl(*scripted("ok")[:2])
        await control.ping()
        for _ in range(2):
            with pytest.raises(GuestSilentError, match="connection was closed"):
                await control.ping()
        await control.close()

    asyncio.run(talk())


def test_requests_of_several_tasks_keep_their_numbers() -> None:
    async def talk() -> None:
        client = KvClient(*scripted("ok 1 1", "ok 2 2", "error 3 no such key", "ok 4 4")[:2])
        sums = await asyncio.gather(*(client.incr("n") for _ in range(4)), return_exceptions=True)
        assert sums[0] == 1
        assert sums[1] == 2
        assert isinstance(sums[2], GuestRefusedError)
        assert sums[3] == 4
        await client.close()

    asyncio.run(talk())


def test_a_doubled_request_is_found() -> None:
    async def talk() -> None:
        client = KvClient(*scripted("ok 1 a", "ok 3 a")[:2])
        assert await client.echo("a") == "a"
        with pytest.raises(ContinuityError):
            await client.echo("a")
        await client.close()

    asyncio.run(talk())
