"""Who asks a command for its end, by Ctrl-C or a signal, while it has no work that could go back.

It imports next to nothing: a command listens from its first moment on.
"""

import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequestedError(BaseException):
    """One of them has come. No library takes it for its own, as they do with KeyboardInterrupt."""


def signals() -> list[signal.Signals]:
    """Signals that ask to stop; not SIGHUP if it is ignored already (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [one for one in _SIGNALS if not (ignored and one is signal.SIGHUP)]


def listen() -> None:
    """From here on it is raised wherever the command is; `loop.run` has its own way meanwhile."""
    for number in signals():
        signal.signal(number, _raise)


def listen_no_more() -> None:
    """It ends already."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise StopRequestedError
