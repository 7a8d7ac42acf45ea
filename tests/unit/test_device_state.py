"""What stands before the devices in a migration's stream, found by the devices alone."""

import struct

from vmckpt.epoch.head import head_of

HEAD = b"QEVM" + bytes([0, 0, 0, 3]) + b"\x07\0\0\0\x03q35" + b"\x01\0\0\0\x02\x03ram" + b"rom" * 99


def section(number: int, name: bytes, content: bytes) -> bytes:
    return struct.pack(">BIB", 4, number, len(name)) + name + content


def devices(state: bytes) -> bytes:
    found = section(0, b"timer", b"\x01" * 40) + section(1, b"globalstate", state.ljust(100, b"\0"))
    return found + section(7, b"cpu", bytes(range(256))) + b"\0"


DESCRIPTION = b"\x06\0\0\0\x02{}"


def test_it_is_all_before_the_first_device() -> None:
    migrated = HEAD + devices(b"paused") + b'\x06\0\0\0\x0f{"devices": []}'
    assert head_of(migrated, devices(b"running") + DESCRIPTION) == HEAD


def test_where_the_devices_are_others_there_is_none() -> None:
    migrated = HEAD + devices(b"paused") + DESCRIPTION
    fewer = section(0, b"timer", b"\x01" * 40) + section(7, b"cpu", bytes(range(256))) + b"\0"
    for other in (
        b"",
        DESCRIPTION,
        devices(b"paused").replace(b"timer", b"timex"),
        devices(b"paused").replace(bytes(range(256)), bytes(reversed(range(256)))),
        fewer + bytes(1 << 12),
        b"\x01" + devices(b"paused")[1:],
    ):
        assert head_of(migrated, other) is None
    assert head_of(devices(b"paused"), devices(b"paused")) is None  # a stream begins otherwise
