"""images/debian.py reaches other suites by the archive that the machine already uses."""

import re
from pathlib import Path

import pytest

from images.debian import CannotProvideError, parse_sources, private_sources, read

FOUND = re.search(r"^VERSION_CODENAME=(\w+)", read("/etc/os-release"), re.MULTILINE)
CODENAME = FOUND[1] if FOUND else "bookworm"

VENDOR = f"deb https://vendor.example/apt {CODENAME} main\n"
ONE_LINE = f"""\
# deb http://commented.example/debian {CODENAME} main
deb-src http://archive.example/debian {CODENAME} main
deb [arch=amd64 signed-by=/keys/debian-archive.gpg] http://archive.example/debian {CODENAME} main
"""
DEB822 = f"""\
Types: deb deb-src
# a comment in a stanza
URIs: http://archive.example/debian
Suites: {CODENAME} {CODENAME}-updates
Components: main contrib
Check-Valid-Until: no
Signed-By:
 -----BEGIN debian-archive KEY-----
 .
 abc=

Types: deb
URIs: http://security.example/debian-security
Suites: {CODENAME}-security
Components: main
"""


def etc_apt(tmp_path: Path, **files: str) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    for name, text in files.items():
        (tmp_path / "sources.list.d" / name.replace("_", ".")).write_text(text)
    return tmp_path


def test_one_line_style_keeps_archive_and_key(tmp_path: Path) -> None:
    where = etc_apt(tmp_path, a_list=VENDOR, b_list=ONE_LINE)
    assert private_sources("bookworm-backports", where) == (
        "types: deb\n"
        "suites: bookworm bookworm-backports\n"
        "components: main\n"
        "targets: Packages\n"
        "uris: http://archive.example/debian\n"
        "signed-by: /keys/debian-archive.gpg\n"
    )


def test_deb822_style_keeps_every_other_field(tmp_path: Path) -> None:
    text = private_sources("bookworm", etc_apt(tmp_path, debian_sources=DEB822))
    archive, security = text.split("\n\n")
    assert "suites: bookworm\n" in archive
    assert "check-valid-until: no\n" in archive
    assert archive.endswith("KEY-----\n .\n abc=")
    assert "suites: bookworm-security\n" in security


def test_a_switched_off_entry_is_not_used(tmp_path: Path) -> None:
    off = DEB822.replace("Types: deb deb-src", "Enabled: no\nTypes: deb")
    with pytest.raises(CannotProvideError, match="no Debian archive"):
        private_sources("bookworm", etc_apt(tmp_path, debian_sources=off))


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "debian.list.save"
    file.write_text(ONE_LINE)
    assert list(parse_sources(file)) == []
