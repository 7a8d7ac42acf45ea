"""vmckpt host images: what is in hosts' folders of images, what uses it, and its removal."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.confirm import Yes, confirm
from vmckpt.cli.output import Json, run, show, warn

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host
    from vmckpt.vm.disks.images import HostImage


def images(
    host: Annotated[str | None, typer.Argument(help="Host. [default: all hosts]")] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(help="Remove this unused image (repeatable).", metavar="IMAGE"),
    ] = None,
    remove_unused: Annotated[
        bool, typer.Option("--remove-unused", help="Remove all unused images.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """List a host's images and their users.

    Images in its own directory; unused ones can be removed.
    """
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.vm.disks.images import remove_images, unused

    if not (remove or remove_unused):
        _list(host, as_json=json)
        return
    if host is None:
        raise UsageError(
            "no host is named",
            why="images are removed on one host at a time",
            remedy="vmckpt host images HOST --remove IMAGE",
        )
    there = find_host(host)
    wanted = run(unused(there, remove or [], every=remove_unused))
    if wanted:
        confirm(_loss(wanted, host), yes=yes, as_json=json)
    removed = run(remove_images(there, [image.path for image in wanted]))
    names = [str(image.path) for image in removed]
    show(
        {"host": host, "removed": names, "freed_bytes": sum(i.allocated_bytes for i in removed)},
        f"removed: {', '.join(names) or 'nothing'}",
        as_json=json,
    )


def _list(name: str | None, *, as_json: bool) -> None:
    from vmckpt.hosts.every import ask_every
    from vmckpt.hosts.inventory.inventory import all_hosts, find_host
    from vmckpt.ui.tables import table
    from vmckpt.units import format_size

    async def inspect(host: "Host") -> "tuple[Host, list[HostImage]]":
        from vmckpt.vm.disks.images import files_of_domains, images_of

        return host, await images_of(host, await files_of_domains(host))

    found = run(ask_every([find_host(name)] if name else all_hosts(), inspect))
    for error in found.silent:
        warn(f"not asked: {error}")
    facts = [_facts(host, image) for host, images in found.given for image in images]
    rows = [
        (
            one["host"],
            Path(one["path"]).name,
            format_size(one["size_bytes"]),
            format_size(one["allocated_bytes"]),
            ", ".join(one["users"]) or "nothing",
        )
        for one in facts
    ]
    silent = [{"what": e.what, "why": e.why, "remedy": e.remedy} for e in found.silent]
    text = table(("host", "image", "size", "on disk", "used by"), rows)
    show({"images": facts, "silent": silent}, text, as_json=as_json)


def _facts(host: "Host", image: "HostImage") -> dict[str, Any]:
    return {
        "host": host.name,
        "path": str(image.path),
        "size_bytes": image.size_bytes,
        "allocated_bytes": image.allocated_bytes,
        "users": list(image.users),
    }


def _loss(images: "Iterable[HostImage]", host: str) -> str:
    from vmckpt.units import format_size

    lines = [f"  {image.path} ({format_size(image.allocated_bytes)})" for image in images]
    return "\n".join([f"These images on {host} are removed for good:", *lines])
