"""What the chosen method risks, and which one "auto" comes to."""

from collections.abc import Iterator
from dataclasses import replace

from vmckpt.migrate.check import REFUSE, WARN, Check
from vmckpt.migrate.options import Method, Options
from vmckpt.qemu.replies import QemuVersion


def resolve_method(options: Options, *, loses_pages: bool) -> Options:
    """The options with "auto" replaced by the method that it comes to."""
    if options.method is not Method.AUTO:
        return options
    if loses_pages:
        return replace(options, method=Method.STOP)
    return replace(options, method=Method.PRECOPY, auto_converge=True)


def loses_dirty_pages(accel: str, qemu_major: int) -> bool:
    """Whether a QEMU as a source now and then misses what its guest has written."""
    # Seen with 7.2, never with 10.0; which version in between mended it is not known here.
    return accel == "tcg" and qemu_major < 8


def postcopy_risk(options: Options) -> Iterator[Check]:
    """What post-copy risks, when it could come to it."""
    if not options.may_postcopy:
        return
    risk = (
        "in post-copy the guest runs on the target while its memory is still on both hosts: "
        "a source that dies then takes the guest with it"
    )
    if options.never_risk_postcopy:
        yield Check("postcopy-risk", REFUSE, risk, "use --method precopy or stop")
    else:
        yield Check("postcopy-risk", WARN, risk, "--never-risk-postcopy refuses it")


def lost_pages(version: QemuVersion, options: Options) -> Iterator[Check]:
    """What a source that loses dirty pages does to the guest."""
    if options.method is Method.STOP:
        return
    qemu = f"QEMU {version} as a source under TCG loses dirty pages"
    remedy = "use --method stop, which needs no dirty tracking, or run it under a newer QEMU"
    if options.may_postcopy:
        yield Check("tcg-dirty-log", REFUSE, f"{qemu}: post-copy destroys the guest", remedy)
    else:
        reason = f"{qemu} now and then: the guest may be damaged although QEMU says 'completed'"
        yield Check("tcg-dirty-log", WARN, reason, remedy)
