"""Text of /proc: what others call processes, mounts and files is none of the kernel's words."""

import pytest

from vmckpt.procfs import lines, status_fields
from vmckpt.store.backends.file_systems import FileSystem, mounted_at

STATUS = """\
Name:\t{name}
Umask:\t0022
State:\tS (sleeping)
Tgid:\t7
Uid:\t1000\t1000\t1000\t1000
Seccomp:\t2
"""


@pytest.mark.parametrize(
    "name", ["sh", "\rUid:\t0\t0\t0\t0", "\x0cSeccomp:\t0\x0c", "\rState:\tR", "\x85VmRSS:\tx"]
)
def test_a_process_says_nothing_of_itself_but_its_name(name: str) -> None:
    expected = {
        "State": ["S", "(sleeping)"],
        "Tgid": ["7"],
        "Uid": ["1000"] * 4,
        "Seccomp": ["2"],
    }
    text = STATUS.format(name=name)
    assert status_fields(text) == expected
    # As `Host.read_text` has it.
    assert status_fields(text.replace("\r", "\n")) == expected


@pytest.mark.parametrize("text", ["", "\n", "Name:\tsh\n"])
def test_of_a_process_that_is_gone_nothing_is_known(text: str) -> None:
    assert status_fields(text) == {}


def test_only_a_newline_ends_a_line() -> None:
    assert lines("a\rb\x0bc\x0cd\x1ce\u2028f\n\ng\n") == ["a\rb\x0bc\x0cd\x1ce\u2028f", "g"]


def test_nobody_mounts_what_looks_like_another_mount() -> None:
    """With FUSE any user mounts anything in a directory of theirs, whatever that is called."""
    mounts = "22 1 0:9 / /srv rw - nfs server:/ rw,nolock\n"
    mounts += "23 1 0:10 / /home/u/x\r9\x0b1 0:9 / /srv rw - ext4 /dev/vda1 rw\r rw - fuse x rw\n"
    assert mounted_at("/srv/store", mounts) == FileSystem("nfs", "/srv", ("rw", "rw", "nolock"))
