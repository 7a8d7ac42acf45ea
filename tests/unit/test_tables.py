"""Tables that fit a terminal, facts in words, and colours where they are wanted."""

import io

import pytest

from vmckpt.ui.colour import coloured
from vmckpt.ui.tables import fields, in_words, table

pytestmark = pytest.mark.unit
ROWS = [
    ("ok", "qemu", "QEMU 10.0.2"),
    ("refuse", "cpu-features", "the destination's CPU lacks avx512f, which the guest may use"),
]


def test_without_a_terminal_each_row_is_a_line() -> None:
    assert table(("verdict", "check", "reason"), ROWS) == (
        "VERDICT  CHECK         REASON\n"
        "ok       qemu          QEMU 10.0.2\n"
        "refuse   cpu-features  the destination's CPU lacks avx512f, which the guest may use"
    )


def test_on_a_terminal_it_fits() -> None:
    text = table(("verdict", "check", "reason"), ROWS, width=50)
    assert max(map(len, text.splitlines())) <= 50
    assert [line[:23] for line in text.splitlines()[2:]] == [
        "refuse   cpu-features  ",
        " " * 23,
        " " * 23,
    ]
    last = " ".join(line[23:] for line in text.splitlines()[2:])
    assert last == ROWS[1][2]


def test_a_word_is_never_broken() -> None:
    word = "/var/lib/vmckpt/" + "x" * 60
    text = table(("name", "path"), [("a", word), ("b", "short")], width=40)
    assert word in text


def test_facts_have_units_and_no_python() -> None:
    facts = {
        "name": "web", "memory_bytes": 1 << 30, "speed_bytes_per_s": 1e6, "took_s": 1.5,
        "pause_ms": 2.25, "adopted": False, "guest_agent": True, "pid": None, "disks": [],
        "cannot": ["migrate", "replicate"], "placement": {"node": 0, "cpus": None},
    }  # fmt: skip
    shown = dict(in_words(facts))
    assert shown == {
        "name": "web", "memory": "1.00 GiB", "speed": "977 KiB/s", "took": "1.50 s",
        "pause": "2.2 ms", "adopted": "no", "guest agent": "yes", "pid": "-", "disks": "-",
        "cannot": "migrate, replicate", "placement": "node 0",
    }  # fmt: skip
    assert not {"None", "[]", "False"} & set(fields(in_words(facts)).split())


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


def test_verdicts_and_errors_have_colours_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = "error: no\nok       qemu  refuse  it\n  warn  clock: okay\nokay  x\nwarn of it"
    assert coloured(text, io.StringIO()) == text
    assert coloured(text, Terminal()) == (
        "\033[31merror:\033[0m no\n\033[32mok\033[0m       qemu  refuse  it\n"
        "  \033[33mwarn\033[0m  clock: okay\nokay  x\nwarn of it"
    )
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert coloured(text, Terminal()) == text
        monkeypatch.delenv(name)
