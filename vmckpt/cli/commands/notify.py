"""vmckpt notify."""

from typing import Annotated

import typer

from vmckpt.cli.output import Json, run, show, warn

CommandLine = Annotated[
    str | None,
    typer.Option(
        "--command", help="Run this command with the notification on its input.", metavar="COMMAND"
    ),
]
Webhook = Annotated[
    str | None,
    typer.Option("--webhook", help="Send the notification there, by POST.", metavar="URL"),
]
Events = Annotated[
    list[str] | None,
    typer.Option("--event", help="Notify of this event only (repeatable).", metavar="EVENT"),
]


def notify(
    command: CommandLine = None,
    webhook: Webhook = None,
    event: Events = None,
    undelivered: Annotated[
        bool,
        typer.Option(
            "--undelivered", help="List undelivered notifications instead of sending one."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Send a test notification, as set in [notify] of config.toml.

    Services and the scheduler send others, of failovers, lost protection and failed checkpoints, as
    set on the host on which they run.
    """
    if undelivered:
        _list(as_json=json)
        return
    from vmckpt.errors import UsageError, VmckptError
    from vmckpt.hosts.inventory.inventory import local_host
    from vmckpt.jobs.files import new_run
    from vmckpt.notify.delivery import Receivers, deliver
    from vmckpt.notify.notification import Notification, Occasion

    receivers = Receivers.parse(command, webhook, event or [])
    if not receivers.wants(Occasion.TEST):
        raise UsageError(
            "there is nothing to notify",
            why="neither a command nor a webhook is set",
            remedy="set [notify] in config.toml (docs/operations.md), or give --webhook",
        )
    notification = Notification.now(
        Occasion.TEST,
        about=new_run(),
        vm="-",
        host=local_host().name,
        why="vmckpt notify was called",
    )
    failures = run(deliver(notification, receivers, waits_s=()))
    if failures:
        raise VmckptError(
            "the test notification was not delivered",
            why="; ".join(f"{channel}: {why}" for channel, why in failures.items()),
            remedy="correct [notify] in config.toml, or its receiver, and try again",
        )
    which = sorted(receivers.events) or "all"
    text = f"delivered; events that are notified of: {which if event is None else ', '.join(which)}"
    show({"id": notification.id, "events": which}, text, as_json=json)


def _list(*, as_json: bool) -> None:
    from vmckpt.codec import builtins
    from vmckpt.notify.undelivered import load_all
    from vmckpt.ui.tables import table

    known = load_all()
    for error in known.damaged:
        warn(f"not listed: {error.what}: {error.why}")
    found = list(known.records.values())
    rows = [
        (
            one.notification.time,
            one.notification.event,
            one.notification.vm,
            "; ".join(f"{channel}: {why}" for channel, why in one.why.items()),
        )
        for one in found
    ]
    text = table(("time", "event", "vm", "why it was not delivered"), rows) if rows else "none"
    show({"undelivered": [builtins(one) for one in found]}, text, as_json=as_json)
