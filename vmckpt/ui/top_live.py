"""`top` in a terminal: uses the alternate screen, and restores the old one."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.live import Live
from rich.text import Text

from vmckpt.ui.top import frame


@contextmanager
def screen() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Draw facts on the whole terminal during the block; lines are cut at its edge."""
    with Live(Text("looking..."), screen=True, auto_refresh=False) as live:

        def draw(facts: Mapping[str, Any]) -> None:
            at = time.strftime("%H:%M:%S", time.localtime(facts["at_unix_s"]))
            head = Text(f"vmckpt top, {at}  (Ctrl-C ends)\n\n", style="bold")
            text = head.append(Text(frame(facts), style="not bold"))
            text.no_wrap, text.overflow = True, "crop"
            live.update(text, refresh=True)

        yield draw
