"""vmckpt serve, as another vmckpt starts it: the far side of a host that is reached over SSH."""

from vmckpt.cli.loop import run


def far_side() -> None:
    """Answer another vmckpt on standard input and output (internal)."""
    from vmckpt.hosts.inventory.directories import state_dir
    from vmckpt.hosts.remote.stdio import serve_stdio

    run(serve_stdio(state_dir()))
