"""vmckpt deliver: what a service or a scheduler starts to have a notification delivered."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.output import run

if TYPE_CHECKING:
    from vmckpt.notify.delivery import Receivers
    from vmckpt.notify.notification import Notification


def deliver(
    text: Annotated[str, typer.Argument(help="The notification, as JSON.", metavar="JSON")],
) -> None:
    """Deliver a notification as config.toml says (internal)."""
    from vmckpt.errors import VmckptError
    from vmckpt.hosts.processes.scheduling import low_priority
    from vmckpt.notify.delivery import deliver as deliver_
    from vmckpt.notify.notification import Notification

    low_priority()
    notification = Notification.from_text(text)
    try:
        receivers = _receivers()
    except VmckptError as exc:
        _record(notification, {"configuration": f"{exc.what}: {exc.why}"})
        raise typer.Exit(1) from None
    if not receivers.wants(notification.event):
        return
    name = _record(notification)
    failures = run(deliver_(notification, receivers))
    _record(notification, failures, name)
    if failures:
        raise typer.Exit(1)


def _receivers() -> "Receivers":
    """Those of [notify]: a command that vmckpt starts itself has no defaults otherwise."""
    import typer.main

    from vmckpt.cli.main import COMMANDS, NOUNS, command_line
    from vmckpt.cli.tree.defaults import settings
    from vmckpt.notify.delivery import Receivers

    root = typer.main.get_group(command_line(["notify"]))
    found = {one.option: one.value for one in settings(root, (*COMMANDS, *NOUNS))}
    command, webhook = (found.get(name) for name in ("command", "webhook"))
    return Receivers.parse(
        None if command is None else str(command),
        None if webhook is None else str(webhook),
        [str(name) for name in found.get("event", [])],
    )


def _record(
    notification: "Notification", failures: Mapping[str, str] | None = None, name: str = ""
) -> str:
    """Record its delivery, begun or ended. A full disk does not stop it."""
    from vmckpt.errors import StorageError
    from vmckpt.notify.undelivered import begin, settle

    try:
        name = name or begin(notification)
        if failures is not None:
            settle(name, notification, failures)
    except StorageError as exc:
        sys.stderr.write(f"{exc}: {failures or 'not recorded'}: {notification.to_text()}\n")
    return name
