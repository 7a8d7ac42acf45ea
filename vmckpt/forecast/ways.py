"""Which ways are left by what was asked for, what each asks of a migration, what is against it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vmckpt.forecast.model.choose import Intent
from vmckpt.forecast.model.forecast import POSTCOPIES, Way
from vmckpt.options.migration import DEFAULT_CHANNELS, Method, Options
from vmckpt.preflight.finding import REFUSE, WARN, Finding
from vmckpt.preflight.migration import dirty_log

_METHODS = {Way.HYBRID: Method.HYBRID, Way.POSTCOPY: Method.POSTCOPY, Way.STOP: Method.STOP}
_PRECOPIES = (Way.PRECOPY, Way.AUTO_CONVERGE, Way.MULTIFD, Way.ZSTD)


def ways(options: Options) -> tuple[Way, ...]:
    """The ways that are what was asked for. A policy steers pre-copies alone."""
    for way, method in _METHODS.items():
        if options.method is method:
            return (way,)
    if options.compression:
        return (Way.ZSTD,)
    if options.channels:
        return (Way.MULTIFD,)
    if options.auto_converge:
        return (Way.AUTO_CONVERGE,)
    if options.method is Method.PRECOPY:
        return (Way.PRECOPY,)
    if options.policy is None:
        return tuple(Way)
    # Two would slow the guest, each by its own rule.
    slows = options.policy.may_throttle and not options.observe_only
    return tuple(way for way in _PRECOPIES if way is not Way.AUTO_CONVERGE or not slows)


def options_of(way: Way, options: Options, intent: Intent) -> Options:
    """What `migrate` is asked for on this way.

    The ways that are post-copy may be: a wish that it shall not be risked is judged like others.
    """
    most_ms = None if intent.max_pause_s is None else round(1e3 * intent.max_pause_s)
    return replace(
        options,
        method=_METHODS.get(way, Method.PRECOPY),
        auto_converge=way is Way.AUTO_CONVERGE,
        compression=options.compression or ("zstd" if way is Way.ZSTD else None),
        channels=options.channels or (DEFAULT_CHANNELS if way is Way.MULTIFD else None),
        never_risk_postcopy=intent.never_risk_postcopy and way not in POSTCOPIES,
        most_downtime_ms=most_ms,
    )


def against(options: Options, checks: Sequence[Finding]) -> str:
    """Why a way is closed by what was found of it; empty: it is open.

    Where `auto` comes to stopping the guest, because its dirty pages get lost, no other way is open
    unless it was asked for by its method.
    """
    auto = options.method is Method.AUTO
    found = [
        check
        for check in checks
        if check.verdict == REFUSE
        or (auto and check.code == dirty_log.CODE and check.verdict == WARN)
    ]
    return "; ".join(f"[{check.code}] {check.reason}" for check in found)


def warnings(checks: Mapping[Way, Sequence[Finding]]) -> tuple[str, ...]:
    """What the checks of open ways warn of, each once; of which ways, where it is not all."""
    found: dict[str, list[Way]] = {}
    for way, these in checks.items():
        for check in these:
            if check.verdict == WARN:
                found.setdefault(f"[{check.code}] {check.reason}", []).append(way)
    return tuple(
        text if len(of) == len(checks) else f"{', '.join(of)}: {text}" for text, of in found.items()
    )
