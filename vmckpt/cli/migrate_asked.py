"""What is typed after `vmckpt migrate` becomes a migration's migration, or an error."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vmckpt.cli.migrate_options import (
    CompressWord,
    DisksWord,
    MethodWord,
    TimeoutWord,
    TlsWord,
)

if TYPE_CHECKING:
    from vmckpt.options.migration import AtTarget, Options
    from vmckpt.options.policy import Policy


USUAL_DOWNTIME = "300ms"


class Asked(NamedTuple):
    """The options as they were typed."""

    method: MethodWord
    max_downtime: str
    bandwidth: str | None
    timeout: str | None
    on_timeout: TimeoutWord
    auto_converge: bool
    compress: CompressWord
    parallel: int | None
    never_risk_postcopy: bool
    disks: DisksWord
    tls: TlsWord
    policy: Path | None = None
    observe_only: bool = False
    auto_converge_initial: int | None = None
    auto_converge_increment: int | None = None
    compress_level: int | None = None
    xbzrle_cache: str | None = None
    zerocopy: bool = False
    postcopy_bandwidth: str | None = None
    abort_on_error: bool = False
    synchronous_writes: bool = False
    tls_destination: str | None = None
    offline: bool = False
    dname: str | None = None
    xml: Path | None = None
    persistent_xml: Path | None = None
    graphicsuri: str | None = None
    wait_for_calm: str | None = None

    def options(self) -> "Options":
        """For a migration. Raises UsageError when they are malformed or at odds."""
        from vmckpt.errors import UsageError
        from vmckpt.options import migration

        if self.timeout is None and self.on_timeout is not TimeoutWord.abort:
            raise UsageError(
                "--on-timeout has no --timeout",
                why="without one the time is never up",
                remedy="add e.g. --timeout 5m",
            )
        self._require_sense()
        timeout_s, timeout_passes = _timeout(self.timeout)
        return migration.Options(
            method=migration.Method(self.method),
            max_downtime_ms=_downtime_ms(self.max_downtime),
            bandwidth_bytes_per_s=_rate(self.bandwidth),
            timeout_s=timeout_s,
            timeout_passes=timeout_passes,
            on_timeout=migration.OnTimeout(self.on_timeout),
            auto_converge=self.auto_converge,
            throttle_initial_percent=self.auto_converge_initial,
            throttle_increment_percent=self.auto_converge_increment,
            compression=None if self.compress is CompressWord.none else self.compress.value,
            compression_level=self.compress_level,
            xbzrle_cache_bytes=_cache_bytes(self.xbzrle_cache),
            channels=self.parallel,
            zero_copy=self.zerocopy,
            postcopy_bandwidth_bytes_per_s=_rate(self.postcopy_bandwidth),
            disks=migration.Disks(self.disks),
            synchronous_writes=self.synchronous_writes,
            tls=migration.Tls(self.tls),
            tls_name=self.tls_destination,
            abort_on_error=self.abort_on_error,
            offline=self.offline,
            at_target=self._at_target(),
            never_risk_postcopy=self.never_risk_postcopy,
            policy=self._policy(),
            observe_only=self.observe_only,
        )

    def _require_sense(self) -> None:
        """Raises UsageError for an option without the one that it belongs to."""
        from vmckpt.errors import UsageError

        slows = self.auto_converge or (self.method is MethodWord.auto and self.policy is None)
        tuned = self.auto_converge_initial, self.auto_converge_increment
        levels = _LEVELS.get(self.compress, range(0))
        for wrong, what, why, remedy in (
            (
                self.offline and self._of_memory is not None,
                f"{self._of_memory} does not go with --offline",
                "a VM that is off has no memory to move",
                "leave it out",
            ),
            (
                self.offline and self.persistent_xml is not None,
                "--persistent-xml does not go with --offline",
                "libvirt keeps what --xml says of a domain that is off, and looks at no other",
                "use --xml",
            ),
            (
                not slows and tuned != (None, None),
                "--auto-converge-initial and -increment have no --auto-converge",
                "without it QEMU does not slow the guest",
                "add --auto-converge",
            ),
            (
                self.xbzrle_cache is not None and self.compress is not CompressWord.xbzrle,
                "--xbzrle-cache has no --compress xbzrle",
                "nothing else remembers pages",
                "add --compress xbzrle",
            ),
            (
                self.compress_level is not None and self.compress_level not in levels,
                f"--compress-level {self.compress_level} does not go with --compress "
                f"{self.compress.value}",
                "zstd has levels 0 to 20, zlib 0 to 9, xbzrle none",
                "name one of these",
            ),
        ):
            if wrong:
                raise UsageError(what, why=why, remedy=remedy)

    @property
    def _of_memory(self) -> str | None:
        """An option that was given and says how memory moves."""
        given = {
            f"--method {self.method.value}": self.method is not MethodWord.auto,
            "--timeout": self.timeout is not None,
            "--auto-converge": self.auto_converge,
            "--auto-converge-initial": self.auto_converge_initial is not None,
            "--auto-converge-increment": self.auto_converge_increment is not None,
            "--max-downtime": self.max_downtime != USUAL_DOWNTIME,
            "--wait-for-calm": self.wait_for_calm is not None,
            "--compress": self.compress is not CompressWord.none,
            "--parallel": self.parallel is not None,
            "--policy": self.policy is not None,
            "--zerocopy": self.zerocopy,
            "--postcopy-bandwidth": self.postcopy_bandwidth is not None,
            "--abort-on-error": self.abort_on_error,
            "--synchronous-writes": self.synchronous_writes,
            "--graphicsuri": self.graphicsuri is not None,
        }
        return next((option for option, is_given in given.items() if is_given), None)

    def require_forecast(self, *, promises_pause: bool) -> None:
        """Raises UsageError for what no forecast is of, and what could break a promised pause."""
        from vmckpt.errors import UsageError

        if option := next(self._not_forecast(), None):
            raise UsageError(
                f"{option} does not go with what is wished of time and pause",
                why="no forecast is made for it",
                remedy=f"leave out {option}, or the wish",
            )
        if promises_pause and self.on_timeout is not TimeoutWord.abort:
            raise UsageError(
                f"--on-timeout {self.on_timeout.value} does not go with --max-pause",
                why="nobody knows how long the guest stands still then, or waits for its pages",
                remedy="leave one of them out",
            )

    def _not_forecast(self) -> Iterator[str]:
        """What was given of which there is no forecast, or none of it beside something else."""
        compress, method = f"--compress {self.compress.value}", f"--method {self.method.value}"
        given = {
            compress: self.compress in (CompressWord.zlib, CompressWord.xbzrle),
            "--compress-level": self.compress_level is not None,
            "--auto-converge-initial": self.auto_converge_initial is not None,
            "--auto-converge-increment": self.auto_converge_increment is not None,
            "--zerocopy": self.zerocopy,
            "--postcopy-bandwidth": self.postcopy_bandwidth is not None,
            "--synchronous-writes": self.synchronous_writes,
            "--offline": self.offline,
        }
        yield from (option for option, is_given in given.items() if is_given)
        # Of each of these there is a forecast by itself; over channels, compressed or not, is one.
        channels = compress if self.compress is not CompressWord.none else "--parallel"
        apart = {
            channels: self.parallel is not None or self.compress is not CompressWord.none,
            "--auto-converge": self.auto_converge,
            method: self.method not in (MethodWord.auto, MethodWord.precopy),
        }
        for one, other in combinations(
            (option for option, is_given in apart.items() if is_given), 2
        ):
            yield f"{one} beside {other}"

    def _at_target(self) -> "AtTarget | None":
        from vmckpt.options.migration import AtTarget

        if (self.dname, self.xml, self.persistent_xml, self.graphicsuri) == (None,) * 4:
            return None
        xml, persistent_xml = _domain_xml(self.xml), _domain_xml(self.persistent_xml)
        return AtTarget(self.dname, xml, persistent_xml, self.graphicsuri)

    def _policy(self) -> "Policy | None":
        from vmckpt.errors import UsageError

        if self.policy is None:
            if self.observe_only:
                raise UsageError(
                    "--observe-only has no --policy",
                    why="there is nothing to observe",
                    remedy="add --policy FILE",
                )
            return None
        if self.method not in (MethodWord.auto, MethodWord.precopy):
            raise UsageError(
                f"--policy does not go with --method {self.method.value}",
                why="a policy steers a pre-copy",
                remedy="leave out --method; a rule may come to post-copy",
            )
        from vmckpt.options.policy_file import read_policy

        policy = read_policy(self.policy)
        if policy.may_throttle and self.auto_converge and not self.observe_only:
            raise UsageError(
                f"--auto-converge does not go with {self.policy}",
                why="both would slow the guest, each by its own rule",
                remedy="leave out --auto-converge",
            )
        return policy


# What zstd and zlib take for a level.
_LEVELS = {CompressWord.zstd: range(21), CompressWord.zlib: range(10)}
_LEAST_CACHE_BYTES = 4096


def _rate(text: str | None) -> int:
    """Bytes a second; 0: no limit. Raises UsageError."""
    from vmckpt.units import parse_rate_bytes_per_s

    return parse_rate_bytes_per_s(text) if text else 0


def _cache_bytes(text: str | None) -> int | None:
    from vmckpt.errors import UsageError
    from vmckpt.units import parse_size_bytes

    if text is None:
        return None
    size = parse_size_bytes(text)
    if size < _LEAST_CACHE_BYTES or size & (size - 1):
        raise UsageError(
            f"--xbzrle-cache {text} is no size for it",
            why="QEMU takes a power of two, a page at least",
            remedy="write e.g. --xbzrle-cache 256MiB",
        )
    return size


def _domain_xml(file: Path | None) -> str | None:
    if file is None:
        return None
    from vmckpt.errors import UsageError
    from vmckpt.vm.domains.description import parse_domain

    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read {file}", why=str(exc), remedy="name a file of a domain's XML"
        ) from exc
    parse_domain(text)
    return text


def _timeout(text: str | None) -> tuple[float | None, float | None]:
    """A time limit in seconds, or in passes (5x). Raises UsageError."""
    from vmckpt.errors import UsageError
    from vmckpt.units import parse_duration_s

    if text is None:
        return None, None
    if not text.endswith("x"):
        return parse_duration_s(text), None
    number = text.removesuffix("x")
    if not number.replace(".", "", 1).isdecimal() or float(number) <= 1:
        raise UsageError(
            f"--timeout {text} cannot be kept",
            why="sending memory once is 1x, and what was dirtied meanwhile comes on top",
            remedy="write e.g. --timeout 5x",
        )
    return None, float(number)


def _downtime_ms(text: str) -> int:
    from vmckpt.errors import UsageError
    from vmckpt.options.migration import UNLIMITED_DOWNTIME_MS
    from vmckpt.units import parse_duration_s

    downtime_ms = max(1, round(parse_duration_s(text) * 1e3))
    if downtime_ms > UNLIMITED_DOWNTIME_MS:
        raise UsageError(
            f"--max-downtime {text} is too long",
            why=f"QEMU takes at most {UNLIMITED_DOWNTIME_MS // 1000} s",
            remedy="--method stop lets the VM stand still for as long as it takes",
        )
    return downtime_ms
