"""The options of `vmckpt migrate`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
    zlib = "zlib"
    xbzrle = "xbzrle"


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
AutoConvergeInitial = Annotated[
    int | None, typer.Option(help="By how many percent it is slowed first.", min=1, max=99)
]
AutoConvergeIncrement = Annotated[
    int | None, typer.Option(help="By how many percent more each time.", min=1, max=99)
]
Compress = Annotated[
    CompressWord,
    typer.Option(
        help="Compress memory: zstd and zlib over parallel channels; xbzrle sends of a page that "
        "was sent before only what differs."
    ),
]
CompressLevel = Annotated[
    int | None, typer.Option(help="How hard: 0 to 20 for zstd, 0 to 9 for zlib.", min=0, max=20)
]
XbzrleCache = Annotated[
    str | None, typer.Option(help="What xbzrle remembers pages in, e.g. 512MiB.")
]
Zerocopy = Annotated[
    bool,
    typer.Option("--zerocopy", help="Send memory without copying it (--parallel, not encrypted)."),
]
PostcopyBandwidth = Annotated[
    str | None, typer.Option(help="At most this much a second of what nobody waits for.")
]
AbortOnError = Annotated[
    bool,
    typer.Option("--abort-on-error", help="Give up when QEMU stops the guest for a disk's error."),
]
Parallel = Annotated[
    int | None, typer.Option(help="Send memory over so many channels.", min=1, max=64)
]
Disks = Annotated[
    DisksWord,
    typer.Option(help="auto: find out which disks both hosts share, and copy the others."),
]
SynchronousWrites = Annotated[
    bool,
    typer.Option(
        "--synchronous-writes",
        help="Writes to disks that are copied wait for the target from the beginning.",
    ),
]
TlsDestination = Annotated[
    str | None,
    typer.Option(help="Whom the target's certificate is for, if not for its address."),
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Move a VM that is off, its disks as --disks says.")
]
Dname = Annotated[str | None, typer.Option(help="Of a libvirt domain: what it is called there.")]
Xml = Annotated[
    Path | None, typer.Option(help="Of a libvirt domain: its XML there, while it runs.")
]
PersistentXml = Annotated[
    Path | None, typer.Option(help="Of a libvirt domain: its XML there, once it was off.")
]
GraphicsUri = Annotated[
    str | None,
    typer.Option("--graphicsuri", help="Of a libvirt domain: where its display's viewers go to."),
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
# For the dead-man's switch.
Insist = Annotated[bool, typer.Option("--insist", hidden=True)]
