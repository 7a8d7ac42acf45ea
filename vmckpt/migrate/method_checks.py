"""What the chosen method risks, and which one "auto" comes to."""

from collections.abc import Iterator
from dataclasses import replace

from vmckpt.migrate.options import Method, Options
from vmckpt.vm.check import REFUSE, WARN, Check


def resolve_method(options: Options, *, loses_pages: bool) -> Options:
    """The options with "auto" replaced by the method that it comes to."""
    if options.method is not Method.AUTO:
        return options
    if loses_pages:
        return replace(options, method=Method.STOP)
    precopy = replace(options, method=Method.PRECOPY)
    # A policy that slows the guest does so itself.
    return precopy if precopy.throttles_at_will else replace(precopy, auto_converge=True)


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
