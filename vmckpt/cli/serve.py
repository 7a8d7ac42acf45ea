"""vmckpt serve: the far side of a host that is reached over SSH."""

from vmckpt.cli.loop import run


def serve() -> None:
    """Answer another vmckpt on standard input and output; people have no use for it."""
    from vmckpt.hosts.inventory import state_dir
    from vmckpt.hosts.remote.stdio import serve_stdio

    run(serve_stdio(state_dir()))
