"""What the options of `vmckpt migrate` mean."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from vmckpt.migrate.options import Options
    from vmckpt.plan.policy import Policy


class MethodWord(StrEnum):
    """--method; means what migrate.options.Method says."""

    auto = "auto"
    precopy = "precopy"
    postcopy = "postcopy"
    hybrid = "hybrid"
    stop = "stop"


class TimeoutWord(StrEnum):
    """--on-timeout."""

    abort = "abort"
    postcopy = "postcopy"
    pause = "pause"


class DisksWord(StrEnum):
    """--disks; means what migrate.options.Disks says."""

    auto = "auto"
    shared = "shared"
    copy = "copy"


class TlsWord(StrEnum):
    """--tls; means what migrate.options.Tls says."""

    auto = "auto"
    require = "require"
    psk = "psk"
    off = "off"


class CompressWord(StrEnum):
    """--compress."""

    none = "none"
    zstd = "zstd"


Method = Annotated[
    MethodWord,
    typer.Option(
        help="auto: pre-copy that slows a guest which dirties faster than the link; hybrid: "
        "pre-copy, then post-copy when it will not converge; stop: stopped while memory moves."
    ),
]
MaxDowntime = Annotated[str, typer.Option(help="How long the VM may stand still.")]
Timeout = Annotated[
    str | None,
    typer.Option(
        help="How long memory may take to move, e.g. 5m, or 5x: five times as long as sending it "
        "once takes."
    ),
]
OnTimeout = Annotated[TimeoutWord, typer.Option(help="What to do when that is over.")]
AutoConverge = Annotated[
    bool, typer.Option("--auto-converge", help="Slow the guest until pre-copy ends.")
]
Compress = Annotated[CompressWord, typer.Option(help="Compress memory.")]
Parallel = Annotated[
    int | None, typer.Option(help="Send memory over so many channels.", min=1, max=64)
]
Disks = Annotated[
    DisksWord,
    typer.Option(help="auto: find out which disks both hosts share, and copy the others."),
]
Tls = Annotated[
    TlsWord,
    typer.Option(
        help="auto: by the hosts' certificates (`vmckpt pki`), in clear only between hosts of "
        "one machine that have none; psk: by a key made for this migration."
    ),
]
PolicyFile = Annotated[
    Path | None, typer.Option("--policy", help="What to do when rounds gain nothing (TOML).")
]
ObserveOnly = Annotated[
    bool, typer.Option("--observe-only", help="The policy only says what it would do.")
]
WaitForCalm = Annotated[
    str | None, typer.Option(help="Wait so long for a moment in which it dirties little.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only check; change nothing.")]
Recover = Annotated[
    bool, typer.Option("--recover", help="Finish or undo a migration that was cut off.")
]


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

    def options(self) -> "Options":
        """For a migration. Raises UsageError when they are malformed or at odds."""
        from vmckpt.errors import UsageError
        from vmckpt.migrate import options
        from vmckpt.units import parse_rate_bytes_per_s

        if self.timeout is None and self.on_timeout is not TimeoutWord.abort:
            raise UsageError(
                "--on-timeout has no --timeout",
                why="without one the time is never up",
                remedy="add e.g. --timeout 5m",
            )
        timeout_s, timeout_passes = _timeout(self.timeout)
        return options.Options(
            method=options.Method(self.method),
            max_downtime_ms=_downtime_ms(self.max_downtime),
            bandwidth_bytes_per_s=parse_rate_bytes_per_s(self.bandwidth) if self.bandwidth else 0,
            timeout_s=timeout_s,
            timeout_passes=timeout_passes,
            on_timeout=options.OnTimeout(self.on_timeout),
            auto_converge=self.auto_converge,
            compression=None if self.compress is CompressWord.none else self.compress.value,
            channels=self.parallel,
            disks=options.Disks(self.disks),
            tls=options.Tls(self.tls),
            never_risk_postcopy=self.never_risk_postcopy,
            policy=self._policy(),
            observe_only=self.observe_only,
        )

    def _policy(self) -> "Policy | None":
        from vmckpt.errors import UsageError
        from vmckpt.migrate.policy_file import read_policy

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
        policy = read_policy(self.policy)
        if policy.may_throttle and self.auto_converge and not self.observe_only:
            raise UsageError(
                f"--auto-converge does not go with {self.policy}",
                why="both would slow the guest, each by its own rule",
                remedy="leave out --auto-converge",
            )
        return policy


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
    from vmckpt.migrate.options import UNLIMITED_DOWNTIME_MS
    from vmckpt.units import parse_duration_s

    downtime_ms = max(1, round(parse_duration_s(text) * 1e3))
    if downtime_ms > UNLIMITED_DOWNTIME_MS:
        raise UsageError(
            f"--max-downtime {text} is too long",
            why=f"QEMU takes at most {UNLIMITED_DOWNTIME_MS // 1000} s",
            remedy="--method stop lets the VM stand still for as long as it takes",
        )
    return downtime_ms
