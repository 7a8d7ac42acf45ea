"""vmckpt replica-domain: what `replicate start` asks of a libvirt domain's host."""

from typing import Annotated

import typer

from vmckpt.cli.output import run, show


def replica_domain(
    question: Annotated[str, typer.Argument(help="What is asked (JSON).")],
) -> None:
    """Say what a domain is, for its replication (internal)."""
    from vmckpt.codec import builtins
    from vmckpt.replicate.domains.described import describe

    show(builtins(run(describe(question))), "", as_json=True)
