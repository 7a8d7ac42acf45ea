"""Which options of `vmckpt checkpoint` go with which kind of checkpoint, and with a group."""

from vmckpt.cli.options.checkpoint_options import CheckpointKind


def whose(vm: str | None) -> str:
    """The VM whose snapshots are meant. Raises UsageError: none is named."""
    from vmckpt.errors import UsageError

    if vm is None:
        raise UsageError(
            "the VM is not named",
            why="with --kind internal they are in the VM's own image",
            remedy="name the VM: --vm NAME, or `list NAME`",
        )
    return vm


def require_replaceable(
    name: str | None, group: str | None, kind: CheckpointKind, *, replace: bool
) -> None:
    """--replace is for one named checkpoint in a store. Raises UsageError."""
    from vmckpt.errors import UsageError

    if not replace:
        return
    if name is None:
        raise UsageError(
            "--replace is given without --name",
            why="it replaces the checkpoint of that name",
            remedy="add --name NAME",
        )
    if group is not None or kind is CheckpointKind.internal:
        raise UsageError(
            f"--replace cannot be combined with {'--group' if group else '--kind internal'}",
            why="the old one would be removed before the new one is safe",
            remedy="take the new one under another name, then remove the old one",
        )


def require_disks_only(group: str | None, kind: CheckpointKind, *, eager: bool) -> None:
    """--disks-only is for one checkpoint in a store. Raises UsageError."""
    from vmckpt.errors import UsageError

    for given, option in (
        (group, "--group"),
        (kind is not CheckpointKind.epoch, "--kind"),
        (eager, "--eager"),
    ):
        if given:
            raise UsageError(
                f"--disks-only and {option} are both given",
                why="it restores the disks of one checkpoint in a store, and no memory",
                remedy=f"leave out {option}",
            )


def require_of_group(
    group: str | None,
    kind: CheckpointKind,
    its_own: dict[str, str | bool | None],
    *,
    outside: bool = True,
) -> None:
    """`its_own` options make sense for a group alone, or (not `outside`) for all but a group."""
    from vmckpt.errors import UsageError

    if group is not None and kind is not CheckpointKind.epoch:
        raise UsageError(
            f"--group and --kind {kind} are both given",
            why="a group's VMs are taken while they run, all at one moment",
            remedy="leave out --kind",
        )
    for option, value in its_own.items():
        if value is not None and (group is None) is outside:
            raise UsageError(
                f"{option} is given {'without' if outside else 'with'} --group",
                why="a group replaces its own VMs" if group else "one VM's output is not held",
                remedy=f"leave out {option}",
            )
