"""Records docs/tour.md again: runs each of its commands, and writes what they print below them.

    python -m benchmarks.tour

Commands are the lines `    $ ...` of the page (a here-document continues to its END), in one
lab; `<!-- wait: TEXT -->` waits until the console of the VM `web` has the text, and
`<!-- screen: FILE: COMMAND -->` writes what a terminal of 80 columns shows then as a picture.
"""

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

PAGE = Path(__file__).parents[1] / "docs/tour.md"
STATE = Path("/tmp/tour/state")
_WAIT = re.compile(r"<!-- wait: (.*) -->")
_SCREEN = re.compile(r"<!-- screen: (\S+\.svg): (.*) -->")
_FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)
COLUMNS, LINES = 80, 24
WAIT_S = 180.0
# Of a longer output the end is left out.
MOST_LINES = 40


def blocks(text: str) -> Iterator[list[str]]:
    """The lines of the page, those of one indented block together."""
    block: list[str] = []
    lines = text.splitlines()
    for line, following in pairwise([*lines, ""]):
        # Outputs have empty lines.
        indented = line.startswith("    ") or (
            not line and following.startswith("    ") and not following.startswith("    $ ")
        )
        if indented and block and block[0].startswith("    "):
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
    if found := _SCREEN.match(block[0]):
        picture(PAGE.with_name(found[1]), found[2])
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


def picture(path: Path, command: str) -> None:
    """What a terminal shows once the command has ended, as SVG."""
    name = f"vmckpt-tour-{os.getpid()}"
    tmux = ["tmux", "-L", name]
    path_here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = f"PATH={path_here} VMCKPT_STATE_DIR={STATE} PS1='$ ' bash --norc -i"
    words = ["new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), shell]
    subprocess.run([*tmux, *words], cwd=PAGE.parents[1], check=True)
    try:
        prompted(tmux, 1)
        subprocess.run([*tmux, "send-keys", command, "Enter"], check=True)
        shown = prompted(tmux, 2)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(shown.rstrip().removesuffix("$").rstrip()))
    # Without fonts from elsewhere: nothing is fetched for it.
    drawn = _FONT.sub("", console.export_svg(title="vmckpt", unique_id="vmckpt"))
    path.write_text("\n".join(line.rstrip() for line in drawn.splitlines() if line.strip()) + "\n")


def prompted(tmux: list[str], count: int) -> str:
    """What the terminal shows once the shell has asked for a command so many times."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        shown = captured([*tmux, "capture-pane", "-p", "-e"])
        lines = shown.rstrip().splitlines()
        if (
            lines
            and lines[-1].rstrip() == "$"
            and sum(line.startswith("$") for line in lines) >= count
        ):
            return shown
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the terminal shows no end after {WAIT_S:g} s:\n{shown}")
        time.sleep(0.2)


def captured(words: list[str]) -> str:
    """What a command prints."""
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


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
