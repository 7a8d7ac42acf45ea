"""Messages between two vmckpts: their bytes stay what they are, and what is noise is named."""

import asyncio
import hashlib
import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from vmckpt.errors import BusyError, HostDownError, StorageError, VmckptError
from vmckpt.hosts.host import Allocation, Completed, Executable, Fingerprint, Host, Queues
from vmckpt.hosts.lock import Owner
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.hosts.remote.frames import (
    MAGIC,
    PROTOCOL,
    Frame,
    ProtocolError,
    RpcFrameKind,
    credit,
    read_frame,
    with_json,
)
from vmckpt.hosts.remote.serve import QUESTIONS
from vmckpt.hosts.remote.values import (
    bind,
    pack,
    pack_error,
    unbind,
    unpack,
    unpack_answer,
    unpack_error,
)
from vmckpt.qemu.monitor import CommandRefusedError, MonitorLostError


def read(data: bytes) -> Frame:
    async def play() -> Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader)

    return asyncio.run(play())


def test_the_bytes_of_the_protocol_do_not_change() -> None:
    assert MAGIC == b"\0vmckpt-serve\n"
    request = with_json(RpcFrameKind.REQUEST, 258, {"do": "exists", "with": {"path": "/x"}})
    assert request.encode() == (b'\0\0\0\x24\x02\0\0\x01\x02{"do":"exists","with":{"path":"/x"}}')
    assert credit(7, 65536).encode() == b"\0\0\0\x04\x07\0\0\0\x07\0\x01\0\0"
    assert Frame(RpcFrameKind.PING).encode() == b"\0\0\0\0\x0a\0\0\0\0"
    assert {kind.name: kind.value for kind in RpcFrameKind} == {
        "HELLO": 1, "REQUEST": 2, "ANSWER": 3, "ERROR": 4, "CANCEL": 5, "DATA": 6, "CREDIT": 7,
        "END": 8, "CLOSE": 9, "PING": 10, "PONG": 11,
    }  # fmt: skip


def test_the_protocol_has_another_number_when_its_questions_change() -> None:
    """Else a host with an older vmckpt is not refused, and fails in the middle of an operation."""
    parts = [f"{name}{inspect.signature(question)}" for name, question in sorted(QUESTIONS.items())]
    kinds = {kind for question in QUESTIONS.values() for kind in get_type_hints(question).values()}
    kinds |= {inner for kind in kinds for inner in get_args(kind)}
    parts += sorted(
        f"{get_type_hints(kind)}"
        for kind in kinds
        if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
    )
    # What vmckpt calls a type is no part of the protocol: its fields are.
    told = re.sub(r"\bvmckpt\.[\w.]+", "one of ours", "\n".join(parts))
    found = hashlib.sha256(told.encode()).hexdigest()[:16]
    assert (PROTOCOL, found) == (8, "c582d1e659cdf937"), "raise PROTOCOL, and write both down here"


@pytest.mark.parametrize(
    "frame", [Frame(RpcFrameKind.DATA, 4_294_967_295, b"\0\xff"), Frame(RpcFrameKind.PONG)]
)
def test_a_frame_is_read_as_it_was_written(frame: Frame) -> None:
    assert read(frame.encode()) == frame


@pytest.mark.parametrize("noise", [b"HTTP/1.1 400 Bad Request\r\n", b"\0\0\0\0\x63\0\0\0\0"])
def test_noise_is_no_frame(noise: bytes) -> None:
    with pytest.raises(ProtocolError, match="data that is not a message"):
        read(noise)


def test_a_frame_that_is_cut_off_is_the_end() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        read(Frame(RpcFrameKind.DATA, 1, b"abc").encode()[:-1])


def test_payloads_that_make_no_sense_are_named() -> None:
    with pytest.raises(ProtocolError, match="a message of kind ANSWER: it is not valid JSON"):
        assert Frame(RpcFrameKind.ANSWER, 1, b"{").json
    with pytest.raises(ProtocolError, match="CREDIT"):
        assert Frame(RpcFrameKind.CREDIT, 1, b"abc").credit_bytes


ANSWERS = [
    (Host.run, Completed(3, "out", "err \ufffd"), [3, "out", "err \ufffd"]),
    (Host.spawn, ProcessId(7, 99), [7, 99]),
    (Host.find_processes, [ProcessId(7, 99), ProcessId(8, 1)], [[7, 99], [8, 1]]),
    (Host.find_executable, Executable(Path("/a b"), 5, 6), ["/a b", 5, 6]),
    (Host.find_executable, None, None),
    (Host.fingerprint, Fingerprint(3, "ab"), [3, "ab"]),
    (Host.lock_owner, Owner("r1", "vm run", 7, 1.5), ["r1", "vm run", 7, 1.5, ""]),
    (Host.listening_ports, frozenset({22, 5}), [5, 22]),
    (Host.socket_queues, Queues(7, 0), [7, 0]),
    (Host.allocation, Allocation(4097, 4096), [4097, 4096]),
    (Host.resolve, Path("/x"), "/x"),
    (Host.read_text, "line\n\ud800", "line\n\ud800"),
    (Host.read_from, b"\0\xff", "00ff"),
    (Host.unix_time_s, 1.25, 1.25),
    (Host.write_text, None, None),
    (Host.exists, True, True),
]


@pytest.mark.parametrize(("question", "answer", "packed"), ANSWERS)
def test_an_answer_arrives_as_it_was_given(question: Any, answer: object, packed: object) -> None:
    assert pack(answer) == packed
    assert unpack_answer(question, packed) == answer


def test_arguments_travel_by_name() -> None:
    given = bind(Host.kill, ProcessId(7, 99), wait_s=2.0)
    assert given == {"which": [7, 99], "wait_s": 2.0}
    assert unbind(Host.kill, given) == {"which": ProcessId(7, 99), "wait_s": 2.0}
    assert bind(Host.run, ["a", "b"]) == {"argv": ["a", "b"]}
    assert unbind(Host.spawn, bind(Host.spawn, ("a",), Path("/log"))) == {
        "argv": ["a"], "stderr_path": Path("/log"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "value"),
    [(ProcessId, [1]), (ProcessId, [1, "x"]), (int, "1"), (str, 1), (Path, 7), (Path, None),
     (list[str], 7), (Owner | None, {}), (bytes, "xy")],
)  # fmt: skip
def test_a_value_of_another_type_is_noise(kind: Any, value: object) -> None:
    with pytest.raises(ProtocolError):
        unpack(kind, value)


def test_an_argument_that_nobody_takes_is_noise() -> None:
    with pytest.raises(ProtocolError, match="has no argument more"):
        unbind(Host.exists, {"path": "/x", "more": 1})


def test_every_question_of_a_host_can_travel() -> None:
    asked_otherwise = {"connect", "lock"}
    names = {name for name in vars(Host) if not name.startswith("_")}
    properties = {name for name in names if isinstance(vars(Host)[name], property)}
    assert names - properties - asked_otherwise == QUESTIONS.keys()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BusyError("a", why="b", remedy="c"), BusyError),
        # A class of a module of its own arrives as what it is a case of.
        (MonitorLostError("a", why="b", remedy="c"), HostDownError),
        (VmckptError("a", why="b", remedy="c"), VmckptError),
    ],
)
def test_an_error_keeps_its_class_and_words(error: VmckptError, kind: type[VmckptError]) -> None:
    found = unpack_error(pack_error(error, "db-1"))
    assert type(found) is kind
    assert (found.what, found.why, found.remedy) == ("a", "b", "c")


def test_an_error_that_is_a_case_of_none_keeps_its_exit_code() -> None:
    found = unpack_error(pack_error(CommandRefusedError("a", "migrate", "no"), "a"))
    assert found.exit_code == CommandRefusedError.exit_code == 7
    assert (found.what, found.why) == ("a refused migrate", "no")


def test_what_is_no_error_of_ours_becomes_one() -> None:
    denied = unpack_error(pack_error(PermissionError(13, "Permission denied", "/x"), "db-1"))
    assert type(denied) is StorageError
    assert (denied.what, denied.why) == ("cannot use /x on db-1", "Permission denied")
    bug = unpack_error(pack_error(ZeroDivisionError("by 0"), "db-1"))
    assert bug.what == "vmckpt has a bug"
    with pytest.raises(ProtocolError):
        unpack_error(["ClassVar", "a", "b", "c"])
