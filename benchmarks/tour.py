"""Records docs/tour.md anew: runs each of its commands, and writes what they print below them.

    python -m benchmarks.tour

Commands are the lines `    $ ...` of the page (a here-document continues to its END), in one
lab; `<!-- wait: TEXT -->` waits until the console of the VM `web` has the text.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/tour.md"
STATE = Path("/tmp/tour/state")
_WAIT = re.compile(r"<!-- wait: (.*) -->")
WAIT_S = 180.0
# Of a longer output the end is left out.
MOST_LINES = 40


def blocks(text: str) -> Iterator[list[str]]:
    """The lines of the page, those of one indented block together."""
    block: list[str] = []
    for line in text.splitlines():
        if line.startswith("    ") and block and block[0].startswith("    "):
            block.append(line)
            continue
        if block:
            yield block
        block = [line]
    yield block


def commands(block: list[str]) -> list[str]:
    """The commands of an indented block, each with its here-document."""
    found: list[str] = []
    in_document = False
    for line in (line[4:] for line in block):
        if in_document:
            found[-1] += f"\n{line}"
            in_document = line != "END"
        elif line.startswith("$ "):
            found.append(line[2:])
            in_document = "<<END" in line
    return found


def recorded(block: list[str]) -> Iterator[str]:
    """The block with what its commands print now."""
    if found := _WAIT.match(block[0]):
        wait_for(found[1])
    given = commands(block) if block[0].startswith("    ") else []
    if not given:
        yield from block
    for command in given:
        print(f"$ {command.splitlines()[0]}", file=sys.stderr)
        lines = command.splitlines()
        yield f"    $ {lines[0]}"
        yield from (f"    {line}" for line in lines[1:])
        said = output(command)
        shown = said[:MOST_LINES] + (["..."] if len(said) > MOST_LINES else [])
        yield from (f"    {line}".rstrip() for line in shown)


def output(command: str) -> list[str]:
    """What a command prints, both streams, as a pipe has it."""
    words = {
        "VMCKPT_STATE_DIR": str(STATE),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=PAGE.parents[1], env={**os.environ, **words, "COLUMNS": "100"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    return done.stdout.splitlines()


def wait_for(text: str) -> None:
    """Until the guest's console has it."""
    deadline_s = time.monotonic() + WAIT_S
    while not any(
        text in log.read_text(errors="replace") for log in STATE.glob("lab/*/vms/web/*/console.log")
    ):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the console has no {text} after {WAIT_S:g} s")
        time.sleep(0.5)


def main() -> None:
    """Record the page; the lab is gone afterwards, whatever happens."""
    STATE.parent.mkdir(exist_ok=True)
    try:
        lines = [line for block in blocks(PAGE.read_text()) for line in recorded(block)]
    finally:
        output("vmckpt lab down --yes")
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
