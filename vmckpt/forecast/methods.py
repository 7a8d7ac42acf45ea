"""The methods that the options allow, what each requires, and what rules it out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vmckpt.forecast.model.choose import Intent
from vmckpt.forecast.model.forecast import POSTCOPIES, TransferMode
from vmckpt.options.migration import DEFAULT_CHANNELS, Method, MigrationOptions
from vmckpt.preflight.finding import REFUSE, WARN, Finding
from vmckpt.preflight.migration import dirty_log

_METHODS = {
    TransferMode.HYBRID: Method.HYBRID,
    TransferMode.POSTCOPY: Method.POSTCOPY,
    TransferMode.STOP: Method.STOP,
}
_PRECOPIES = (
    TransferMode.PRECOPY,
    TransferMode.AUTO_CONVERGE,
    TransferMode.MULTIFD,
    TransferMode.ZSTD,
)


def modes(options: MigrationOptions) -> tuple[TransferMode, ...]:
    """The methods that the options allow. A policy steers pre-copies alone."""
    for mode, method in _METHODS.items():
        if options.method is method:
            return (mode,)
    if options.compression:
        return (TransferMode.ZSTD,)
    if options.channels:
        return (TransferMode.MULTIFD,)
    if options.auto_converge:
        return (TransferMode.AUTO_CONVERGE,)
    if options.method is Method.PRECOPY:
        return (TransferMode.PRECOPY,)
    if options.policy is None:
        return tuple(TransferMode)
    # Auto-converge and a policy that throttles would both slow the guest.
    slows = options.policy.may_throttle and not options.observe_only
    return tuple(mode for mode in _PRECOPIES if mode is not TransferMode.AUTO_CONVERGE or not slows)


def options_of(mode: TransferMode, options: MigrationOptions, intent: Intent) -> MigrationOptions:
    """The options of `migrate` for this method.

    Post-copy methods are allowed here: a constraint against them is judged like others.
    """
    most_ms = None if intent.max_downtime_s is None else round(1e3 * intent.max_downtime_s)
    return replace(
        options,
        method=_METHODS.get(mode, Method.PRECOPY),
        auto_converge=mode is TransferMode.AUTO_CONVERGE,
        compression=options.compression or ("zstd" if mode is TransferMode.ZSTD else None),
        channels=options.channels or (DEFAULT_CHANNELS if mode is TransferMode.MULTIFD else None),
        never_risk_postcopy=intent.never_risk_postcopy and mode not in POSTCOPIES,
        most_downtime_ms=most_ms,
    )


def against(options: MigrationOptions, checks: Sequence[Finding]) -> str:
    """Why the findings rule the method out; empty: they do not.

    If `auto` selects stopping the guest because its dirty pages get lost, no other method is open
    unless it was requested by name.
    """
    auto = options.method is Method.AUTO
    found = [
        check
        for check in checks
        if check.verdict == REFUSE
        or (auto and check.code == dirty_log.CODE and check.verdict == WARN)
    ]
    return "; ".join(f"[{check.code}] {check.reason}" for check in found)


def warnings(checks: Mapping[TransferMode, Sequence[Finding]]) -> tuple[str, ...]:
    """The warnings of open methods, each once, with the methods' names unless all have it."""
    found: dict[str, list[TransferMode]] = {}
    for mode, these in checks.items():
        for check in these:
            if check.verdict == WARN:
                found.setdefault(f"[{check.code}] {check.reason}", []).append(mode)
    return tuple(
        text if len(of) == len(checks) else f"{', '.join(of)}: {text}" for text, of in found.items()
    )
