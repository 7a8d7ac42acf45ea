"""Escape text inside the values of QEMU's options. Pure."""

import json


def double_commas(text: str) -> str:
    """Escape a value in `key=value,...`."""
    return text.replace(",", ",,")


def escaped(text: str, option_value: str) -> str:
    """Escape `text` for an option's value, which may be JSON."""
    if option_value.startswith("{"):
        return json.dumps(text, ensure_ascii=False)[1:-1]
    return double_commas(text)
