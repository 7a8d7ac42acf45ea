"""Former names of commands and options: accepted for one more release, and not shown."""

from collections.abc import Sequence

COMMANDS = {
    ("report",): ("runs", "report"),
    ("replay",): ("runs", "replay"),
    ("host", "doctor"): ("host", "check", "--fixes"),
    ("host", "remove"): ("host", "rm"),
    ("store", "key", "remove"): ("store", "key", "rm"),
}
_KEEP = {f"--{name}": f"--keep-{name}" for name in ("hourly", "daily", "weekly")}
OPTIONS: dict[tuple[str, ...], dict[str, str]] = {
    ("checkpoint", "prune"): _KEEP,
    ("schedule", "add"): _KEEP,
}
# Values of options, for all commands of a noun.
VALUES = {
    ("checkpoint", "--kind", "savevm"): "internal",
    ("schedule", "--kind", "savevm"): "internal",
}


def renamed(words: Sequence[str]) -> list[str]:
    """Replace former names in `words` by the present ones; what follows `--` stays."""
    found = list(words)
    for old, new in COMMANDS.items():
        if tuple(found[: len(old)]) == old:
            found[: len(old)] = new
            break
    options = OPTIONS.get(tuple(found[:2]), {})
    for at, word in enumerate(found):
        name, equals, value = word.partition("=")
        if word == "--":
            break
        if name in options:
            found[at] = options[name] + equals + value
        elif equals:
            found[at] = name + equals + VALUES.get((found[0], name, value), value)
        else:
            found[at] = VALUES.get((found[0], found[at - 1], word), word)
    return found
