"""vmckpt serve, as another vmckpt starts it: the far side of a host that is reached over SSH."""

import os
import stat

from vmckpt.cli.loop import run


def far_side() -> None:
    """Answer another vmckpt on standard input and output (internal).

    Raises UsageError: these are not a connection, as on a terminal or in a unit of systemd.
    """
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.hosts.remote.stdio import serve_stdio

    if not all(map(_is_connected, (0, 1))):
        from vmckpt.errors import UsageError

        raise UsageError(
            "nothing is connected that `vmckpt serve` could answer",
            why="another vmckpt starts it over SSH, with pipes as standard input and output",
            remedy="to run schedules: vmckpt serve --scheduler",
        )
    run(serve_stdio(state_dir()))


def _is_connected(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
