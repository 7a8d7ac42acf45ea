"""Reads a policy file (TOML) into a Policy; errors name the line and the key."""

from dataclasses import replace
from pathlib import Path

from vmckpt.errors import UsageError
from vmckpt.foreign import MalformedError, parse_toml
from vmckpt.options.policy import Act, Policy, PolicyRule
from vmckpt.options.reading import UNLIMITED_DOWNTIME_MS
from vmckpt.units import parse_duration_s
from vmckpt.vm.spec.toml_table import TableSource, TomlTable

MOST_THROTTLE_PERCENT = 99


def read_policy(path: Path) -> Policy:
    """Read the policy in a file. Raises UsageError."""
    try:
        return parse_policy(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read {path}", why=str(exc), remedy="name a policy file (TOML)"
        ) from exc


def parse_policy(text: str, name: str) -> Policy:
    """The policy in `text`; `name` names it in errors."""
    try:
        data = parse_toml(text)
    except MalformedError as exc:
        raise UsageError(f"{name} is not valid TOML", why=str(exc), remedy="fix that line") from exc
    top = TomlTable(data, TableSource(text, name, Path()), ())
    policy = Policy(
        rules=tuple(_rule(table) for table in top.tables("when")),
        stall_percent=top.integer("stall_percent", 96, least=1),
        near_best_percent=top.integer("near_best_percent", 104, least=100),
    )
    top.no_more_keys()
    if not policy.rules:
        raise top.wrong("when", "a policy has at least one rule", "add a [[when]] table")
    return policy


def _rule(table: TomlTable) -> PolicyRule:
    passes = table.integer("passes", 1, least=1) if table.has("passes") else 0
    stalls = 0 if passes and not table.has("stalls") else table.integer("stalls", 0, least=1)
    if not table.has("do"):
        raise table.wrong("do", "a rule says what to do", 'write e.g. do = "postcopy"')
    act = Act(table.choice("do", tuple(act.value for act in Act), Act.ABORT))
    rule = PolicyRule(stalls, act, passes=passes)
    if act is Act.THROTTLE:
        by, most = (table.integer(key, 0, least=1) for key in ("by_percent", "most_percent"))
        if most > MOST_THROTTLE_PERCENT:
            raise table.wrong("most_percent", "QEMU takes at most 99 %", 'or write do = "pause"')
        rule = replace(rule, by_percent=by, most_percent=most)
    elif act is Act.RAISE_DOWNTIME:
        by = table.integer("by_percent", 50, least=1)
        rule = replace(rule, by_percent=by, most_ms=_most_ms(table))
    table.no_more_keys()
    return rule


def _most_ms(table: TomlTable) -> int:
    most = table.text("most")
    try:
        most_ms = round(parse_duration_s(most) * 1e3)
    except UsageError as exc:
        raise table.wrong("most", f"{exc.what}; {exc.why}", exc.remedy) from exc
    if most_ms > UNLIMITED_DOWNTIME_MS:
        raise table.wrong("most", "QEMU takes at most 2000 s", 'write do = "pause" instead')
    return most_ms
