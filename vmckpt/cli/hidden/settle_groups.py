"""vmckpt settle-groups: what the dead-man's switch of `checkpoint create --group` runs."""

from vmckpt.cli.output import run, warn


def settle_groups() -> None:
    """Finish interrupted commits of groups; not for users."""
    from vmckpt.group.journal import settle_left

    for text in run(settle_left()):
        warn(text)
