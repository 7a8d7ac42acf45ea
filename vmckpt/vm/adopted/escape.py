"""Text inside the values of QEMU's options, as their syntax wants it. Pure."""

import json


def double_commas(text: str) -> str:
    """A value as it stands in `key=value,...`."""
    return text.replace(",", ",,")


def escaped(text: str, option_value: str) -> str:
    """`text` as it has to be written inside an option's value, which may be JSON."""
    if option_value.startswith("{"):
        return json.dumps(text, ensure_ascii=False)[1:-1]
    return double_commas(text)
