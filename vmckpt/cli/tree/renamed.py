"""Former names of commands and options: accepted for one more release, and not shown."""

from collections.abc import Mapping, Sequence

COMMANDS = {
    ("report",): ("runs", "report"),
    ("replay",): ("runs", "replay"),
    ("host", "doctor"): ("host", "check", "--fixes"),
    ("host", "remove"): ("host", "rm"),
    ("store", "key", "remove"): ("store", "key", "rm"),
}
_KEEP: dict[str, tuple[str, ...]] = {
    f"--{name}": (f"--keep-{name}",) for name in ("hourly", "daily", "weekly")
}
# Of a command, by its words: what an option is today; its value belongs to the last word.
OPTIONS: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    ("checkpoint", "prune"): _KEEP,
    ("schedule", "add"): _KEEP,
    ("migrate",): {"--max-pause": ("--plan", "--max-downtime")},
    ("plan",): {"--max-pause": ("--max-downtime",)},
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
    end = found.index("--") if "--" in found else len(found)
    options = OPTIONS.get(tuple(found[:1])) or OPTIONS.get(tuple(found[:2]), {})
    return [word for at in range(end) for word in _present(found, at, options)] + found[end:]


def _present(
    words: Sequence[str], at: int, options: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """The words today for one of `words`."""
    word = words[at]
    name, equals, value = word.partition("=")
    if name in options:
        *before, last = options[name]
        return (*before, last + equals + value)
    if equals:
        return (name + equals + VALUES.get((words[0], name, value), value),)
    return (VALUES.get((words[0], words[at - 1], word), word),)
