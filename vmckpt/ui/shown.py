"""Text as a terminal may have it: what guests, hooks, hosts and stores say is in it.

What a terminal or a reader would take for something else than text is written as an escape:
control characters (ESC, CR), and format characters, which turn the direction of writing or have
no width. The last place before text is printed calls these; what is composed of lines has each
piece that others wrote made one line first, so that a newline in it begins none of ours.
"""

import unicodedata

# Control, format, half a surrogate pair, line and paragraph separators (Unicode, chapter 4.5).
_NOT_SHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def one_line(text: str) -> str:
    """One line: newlines and tabs are escaped too."""
    return _escaped(text, "")


def lines(text: str) -> str:
    """Any number of lines, and tabs."""
    return _escaped(text, "\n\t")


def _escaped(text: str, but: str) -> str:
    # Almost all that is shown; a live display asks 8 times a second.
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escape(char) if char not in but and unicodedata.category(char) in _NOT_SHOWN else char
        for char in text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()
