"""Makes text safe for a terminal: guests, hooks, hosts and stores contribute to it.

Anything that a terminal or a reader would not take for text is escaped: control characters (ESC,
CR), and format characters, which change the writing direction or have no width. Call these
functions last, before text is printed; if a text is composed of lines, first make each foreign
piece one line, so that a newline in it cannot start a line of its own.
"""

import unicodedata

# Control, format, half a surrogate pair, line and paragraph separators (Unicode, chapter 4.5).
_NOT_SHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def one_line(text: str) -> str:
    """As one line: newlines and tabs are escaped too."""
    return _escaped(text, "")


def lines(text: str) -> str:
    """As lines: newlines and tabs are kept."""
    return _escaped(text, "\n\t")


def _escaped(text: str, but: str) -> str:
    # The usual case; a live display calls this 8 times a second.
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escape(char) if char not in but and unicodedata.category(char) in _NOT_SHOWN else char
        for char in text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()
