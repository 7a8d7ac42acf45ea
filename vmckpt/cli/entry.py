"""The process `vmckpt`: it lives briefly, so starting and ending it must cost little."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from vmckpt.cli.stop_requests import StopRequestedError, listen, listen_no_more
from vmckpt.state.config_files import are_there

# Imports create tens of thousands of permanent objects: collecting garbage among them took a
# quarter of the start-up time.
_GC_THRESHOLD = 100_000
_JOB_OPTIONS = frozenset({"--recover", "--last", "-v", "-vv"})


def start() -> None:
    """Run the command line and end the process."""
    listen()
    if isinstance(sys.stdout, TextIOWrapper):
        # As on standard error: characters that the terminal's encoding lacks are escaped, without
        # an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    gc.set_threshold(_GC_THRESHOLD)
    is_recovery = "VMCKPT_STARTER" in os.environ
    if is_recovery:
        from vmckpt.hosts.processes.deadman import outlive_starter

        outlive_starter()
    plain = _plain(sys.argv[1:])
    try:
        code = _done(plain) if plain else _run(with_defaults=not is_recovery)
    except StopRequestedError as stop:
        listen_no_more()
        from vmckpt.cli.main import report

        code = report(stop)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the reader of the output is gone
        code = code or 1
    # Shutting the interpreter down costs 30 ms; the kernel frees the same at once.
    os._exit(code)


def _run(*, with_defaults: bool) -> int:
    from vmckpt.cli.main import main

    return main(with_defaults=with_defaults)


def _plain(words: Sequence[str]) -> Callable[[], None] | None:
    """What does without a library for words: its import is a tenth of a short migration.

    What vmckpt starts on other hosts, and waits for; a migration, or a list of VMs, with no option
    but `--json`.
    """
    match words:
        case ["migrate", *rest] if len(names := _only_names(rest)) == 2 and not are_there(
            "migrate"
        ):
            from vmckpt.cli.commands.moving import move_plainly

            return partial(move_plainly, *names, as_json="--json" in rest)
        case ["vm", "list"] | ["vm", "list", "--json"] if not are_there("vm"):
            from vmckpt.cli.commands.listing import list_plainly

            return partial(list_plainly, as_json="--json" in words)
        case ["serve"]:
            from vmckpt.cli.hidden.far_side import far_side

            return far_side
        case ["link", directory] if not directory.startswith("-"):
            from vmckpt.cli.hidden.link import link

            return partial(link, Path(directory))
        case ["echo", interface, mac, address, lock, run, out]:
            from vmckpt.cli.hidden.echo import echo

            return partial(echo, interface, mac, address, Path(lock), run, Path(out))
        case ["job", kind, directory, *rest] if _JOB_OPTIONS.issuperset(rest):
            if "--last" in rest:
                from vmckpt.hosts.processes.scheduling import session_low_priority

                session_low_priority()  # first: everything else is work too
            from vmckpt.cli.hidden.job import job

            detail = ("-v" in rest) + 2 * ("-vv" in rest)
            return partial(job, kind, Path(directory), recover="--recover" in rest, detail=detail)
    return None


def _only_names(words: Sequence[str]) -> list[str]:
    """`words` but for `--json`; none when there is any other option among them."""
    names = [word for word in words if word != "--json"]
    return [] if any(word.startswith("-") for word in names) else names


def _done(plain: Callable[[], None]) -> int:
    from vmckpt.cli.loop import end_running

    os.umask(0o077)
    try:
        plain()
    except Exception as exc:  # noqa: BLE001 - any error is reported
        from vmckpt.cli.main import report

        return report(exc)
    finally:
        end_running()
    return 0


if __name__ == "__main__":
    start()
