"""What a seccomp filter says about a system call, evaluated outside the kernel."""

import errno
import struct

import pytest

from vmckpt.memory.process_call import verdict

pytestmark = pytest.mark.unit
ALLOW, DENY = 0x7FFF0000, 0x00050001
LOAD_NUMBER, LOAD_ARCH, LOAD_ARGUMENT = (0x20, 0, 0, 0), (0x20, 0, 0, 4), (0x20, 0, 0, 16)
X86_64 = 0xC000003E


def program(*instructions: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("<HBBI", *one) for one in instructions)


@pytest.mark.parametrize(
    ("instructions", "number", "said"),
    [
        ([(6, 0, 0, ALLOW)], 323, ALLOW),
        ([LOAD_NUMBER, (0x15, 0, 1, 323), (6, 0, 0, DENY), (6, 0, 0, ALLOW)], 323, DENY),
        ([LOAD_NUMBER, (0x15, 0, 1, 323), (6, 0, 0, DENY), (6, 0, 0, ALLOW)], 3, ALLOW),
        # libseccomp: another architecture first, then a tree of comparisons.
        (
            [LOAD_ARCH, (0x15, 1, 0, X86_64), (6, 0, 0, DENY), LOAD_NUMBER,
             (0x35, 0, 1, 0x40000000), (6, 0, 0, DENY), (0x25, 0, 1, 300), (6, 0, 0, DENY),
             (6, 0, 0, ALLOW)],
            323, DENY,
        ),
        ([LOAD_NUMBER, (0x35, 1, 0, 324), (6, 0, 0, ALLOW), (6, 0, 0, DENY)], 323, ALLOW),
        # An argument's bits, through memory, with a jump over what would deny.
        (
            [LOAD_ARGUMENT, (0x54, 0, 0, 0x7E020000), (0x02, 0, 0, 5), LOAD_NUMBER, (0x60, 0, 0, 5),
             (0x05, 0, 0, 1), (6, 0, 0, DENY), (0x45, 0, 1, 1), (6, 0, 0, DENY), (6, 0, 0, ALLOW)],
            56, ALLOW,
        ),
    ],
)  # fmt: skip
def test_a_filter_is_followed_to_its_verdict(
    instructions: list[tuple[int, int, int, int]], number: int, said: int
) -> None:
    assert verdict(program(*instructions), number) == said


@pytest.mark.parametrize(
    "instructions",
    [
        [(0x07, 0, 0, 0), (6, 0, 0, ALLOW)],  # tax: no filter of these has it
        [(0x20, 0, 0, 64), (6, 0, 0, ALLOW)],  # behind the data
        [(0x60, 0, 0, 16), (6, 0, 0, ALLOW)],
        [(0x05, 0, 0, 9), (6, 0, 0, ALLOW)],
        [],
    ],
)
def test_a_filter_that_is_not_understood_allows_nothing(
    instructions: list[tuple[int, int, int, int]],
) -> None:
    with pytest.raises(OSError, match="seccomp filter") as caught:
        verdict(program(*instructions), 323)
    assert caught.value.errno == errno.EOPNOTSUPP
