"""Commands of this machine that have to end well, and what they say when they do not."""

import os
import subprocess
from collections.abc import Mapping, Sequence


def output(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout_s: float = 60,
) -> str:
    """What a command prints. Raises AssertionError with the end of what it said when it fails."""
    everywhere = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        input=stdin,
        env={**os.environ, **everywhere, **(env or {})},
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        words = f"'{' '.join(argv)}' ended with {done.returncode}"
        # Where a play failed stands far above its end.
        at = max(done.stdout.find("\nfatal: "), done.stdout.find("\nfailed: "), 0)
        said = "\n".join([done.stdout[at : at + 3000], done.stdout[-2000:], done.stderr[-3000:]])
        raise AssertionError(f"{words}:\n{said}")
    return done.stdout
