"""Options of a migration that exclude each other, with remedies."""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from vmckpt.errors import UsageError
from vmckpt.options.declared import About, GivenOption, changed_options
from vmckpt.options.migration import Compression, Method, MigrationOptions, OnTimeout

# The levels that zstd and zlib accept.
_LEVELS = {Compression.ZSTD: range(21), Compression.ZLIB: range(10)}
_STEERED = (Method.AUTO, Method.PRECOPY)


class Odds(NamedTuple):
    """Contradictory options: what, why, and a remedy."""

    what: str
    why: str
    remedy: str

    def error(self) -> UsageError:
        """As an error."""
        return UsageError(self.what, why=self.why, remedy=self.remedy)


def require_sense(options: MigrationOptions) -> MigrationOptions:
    """Raises UsageError for options that exclude each other, or lack the one that they belong
    to.
    """
    for found in (*_without(options), *_beside(options)):
        raise found.error()
    return options


def of_memory(flag: str) -> Odds:
    """The error for an option about memory for a VM that is off."""
    what, why = (
        f"{flag} cannot be combined with --offline",
        "a VM that is off has no memory to move",
    )
    return Odds(what, why, "leave it out")


def require_forecast(options: MigrationOptions, *, promises_downtime: bool) -> None:
    """Raises UsageError for options that are not forecast, or that break a promised downtime."""
    if option := next(_not_forecast(options), None):
        raise UsageError(
            f"{option} cannot be combined with a plan or its constraints",
            why="no forecast is made for it",
            remedy=f"leave out {option}, or --plan and the constraints",
        )
    if promises_downtime and options.on_timeout is not OnTimeout.ABORT:
        raise UsageError(
            f"--on-timeout {options.on_timeout} cannot be combined with --max-downtime in a plan",
            why="it is unknown how long the guest is paused then, or waits for its pages",
            remedy="leave one of them out",
        )


def _without(options: MigrationOptions) -> Iterator[Odds]:
    """Options given without the one that they belong to."""
    if options.on_timeout is not OnTimeout.ABORT and not options.has_timeout:
        why, remedy = "without one the time is never up", "add e.g. --timeout 5m"
        yield Odds("--on-timeout has no --timeout", why, remedy)
    tuned = options.throttle_initial_percent, options.throttle_increment_percent
    slows = options.auto_converge or (options.method is Method.AUTO and options.policy is None)
    if tuned != (None, None) and not slows:
        what = "--auto-converge-initial and -increment have no --auto-converge"
        yield Odds(what, "without it QEMU does not slow the guest", "add --auto-converge")
    if options.xbzrle_cache_bytes is not None and options.compression != Compression.XBZRLE:
        what, why = "--xbzrle-cache has no --compress xbzrle", "nothing else remembers pages"
        yield Odds(what, why, "add --compress xbzrle")
    chosen = Compression(options.compression or Compression.NONE)
    level = options.compression_level
    if level is not None and level not in _LEVELS.get(chosen, ()):
        what = f"--compress-level {level} cannot be combined with --compress {chosen}"
        yield Odds(what, "zstd has levels 0 to 20, zlib 0 to 9, xbzrle none", "name one of these")
    if options.observe_only and options.policy is None:
        what, why = "--observe-only has no --policy", "there is nothing to observe"
        yield Odds(what, why, "add --policy FILE")


def _beside(options: MigrationOptions) -> Iterator[Odds]:
    """Options that exclude each other."""
    if options.offline:
        yield from (
            of_memory(one.flag)
            for one in changed_options(options)
            if About.MEMORY in one.declared.about
        )
        if options.at_target is not None and options.at_target.persistent_xml is not None:
            why = "libvirt uses --xml alone for a domain that is off"
            yield Odds("--persistent-xml cannot be combined with --offline", why, "use --xml")
    if options.policy is None:
        return
    if options.method not in _STEERED:
        what = f"--policy cannot be combined with --method {options.method}"
        remedy = "leave out --method; a rule may switch to post-copy"
        yield Odds(what, "a policy steers a pre-copy", remedy)
    if options.policy.may_throttle and options.auto_converge and not options.observe_only:
        why = "both would slow the guest"
        yield Odds(
            "--auto-converge cannot be combined with a --policy that throttles",
            why,
            "leave out --auto-converge",
        )


def _not_forecast(options: MigrationOptions) -> Iterator[str]:
    """The given options that are not forecast, or not in this combination."""
    given = {one.name: one for one in changed_options(options)}
    compression = given.get("compression")
    if compression and options.compression != Compression.ZSTD:
        yield compression.flag
    yield from (one.flag for one in given.values() if About.UNFORECAST in one.declared.about)
    # Each of these is forecast by itself; sending over channels, compressed or not, counts as one.
    over: GivenOption | None = compression or given.get("channels")
    method = None if options.method in _STEERED else given.get("method")
    apart = [one.flag for one in (over, given.get("auto_converge"), method) if one is not None]
    yield from (f"{one} beside {other}" for one, other in combinations(apart, 2))
