"""What is shown of commands' arguments, which may hold passwords: for `-vv`."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

# Values of these names are not shown: QEMU's secret objects, passwords, what a guest's file holds.
_SECRET = re.compile(r"pass(?:word|wd|phrase)|secret|token|^data$|buf-b64", re.IGNORECASE)
# The same within a text: NAME=VALUE, NAME: VALUE, an option and its value, the password of a URL.
_NAME = r"(?:pass(?:word|wd|phrase)|secret|token)[\w-]*"
_SECRET_IN_TEXT = re.compile(
    rf"({_NAME}[\"']?\s*[=:]\s*|--[\w-]*{_NAME}\s+)[^\s,&]+|(://[^/\s:@]*:)[^@/\s]*(?=@)",
    re.IGNORECASE,
)
_HIDDEN = "***"


def arguments_shown(arguments: Mapping[str, Any]) -> str:
    """A command's arguments as JSON, without secrets."""
    return json.dumps(_without_secrets(arguments), default=str)


def command_shown(argv: Sequence[str]) -> str:
    """A command line, without secrets."""
    return shlex.join(_words_without_secrets(argv))


def _without_secrets(value: Any) -> Any:
    match value:
        case Mapping():
            return {
                name: _HIDDEN if _SECRET.search(str(name)) else _without_secrets(inner)
                for name, inner in value.items()
            }
        case list() | tuple():
            return [_without_secrets(inner) for inner in value]
        case str():
            return _text_without_secrets(value)
    return value


def _words_without_secrets(argv: Sequence[str]) -> list[str]:
    """Also the word after an option such as --password."""
    found, hides = list[str](), False
    for word in argv:
        found.append(_HIDDEN if hides else _text_without_secrets(word))
        hides = word.startswith("-") and "=" not in word and bool(_SECRET.search(word))
    return found


def _text_without_secrets(text: str) -> str:
    return _SECRET_IN_TEXT.sub(lambda found: f"{found[1] or found[2]}{_HIDDEN}", text)
