"""vmckpt host images: what is in hosts' folders of images, what uses it, and its removal.

`vm rm --disks` removes the VM's images by the same rule: nothing else that is known uses them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.confirm import Yes, confirm
from vmckpt.cli.output import Json, run, show, warn

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host
    from vmckpt.vm.images import Image


def images(
    host: Annotated[str | None, typer.Argument(help="The host. [default: all hosts]")] = None,
    remove: Annotated[
        list[str] | None, typer.Option(help="Remove this image, which nothing uses (repeatable).")
    ] = None,
    remove_unused: Annotated[
        bool, typer.Option("--remove-unused", help="Remove every image that nothing uses.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """List the images in a host's own folder and what uses each; remove unused ones."""
    from vmckpt.errors import UsageError
    from vmckpt.hosts.inventory import find_host

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
    wanted = run(_wanted(there, remove or [], every_unused=remove_unused))
    if wanted:
        confirm(_loss(wanted, host), yes=yes, as_json=json)
    removed = run(_removed(there, [image.path for image in wanted]))
    names = [str(image.path) for image in removed]
    show(
        {"host": host, "removed": names, "freed_bytes": sum(i.allocated_bytes for i in removed)},
        f"removed: {', '.join(names) or 'nothing'}",
        as_json=json,
    )


def _list(name: str | None, *, as_json: bool) -> None:
    from vmckpt.hosts.every import ask_every
    from vmckpt.hosts.inventory import all_hosts, find_host
    from vmckpt.ui.tables import table
    from vmckpt.units import format_size

    async def look(host: "Host") -> "tuple[Host, list[Image]]":
        from vmckpt.vm.images import files_of_domains, images_of

        return host, await images_of(host, await files_of_domains(host))

    found = run(ask_every([find_host(name)] if name else all_hosts(), look))
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


def _facts(host: "Host", image: "Image") -> dict[str, Any]:
    return {
        "host": host.name,
        "path": str(image.path),
        "size_bytes": image.size_bytes,
        "allocated_bytes": image.allocated_bytes,
        "users": list(image.users),
    }


async def _wanted(host: "Host", names: Sequence[str], *, every_unused: bool) -> "list[Image]":
    from vmckpt.errors import RefusedError
    from vmckpt.vm.images import chosen, files_of_domains, images_of

    there = await images_of(host, await files_of_domains(host))
    wanted = [chosen(there, name) for name in dict.fromkeys(names)]
    if used := [image for image in wanted if image.users]:
        raise RefusedError(
            f"{used[0].path} on {host.name} is in use",
            why=", ".join(used[0].users),
            remedy="remove what uses it first; nothing was removed",
        )
    if every_unused:
        wanted += [image for image in there if not image.users and image not in wanted]
    return wanted


async def _removed(host: "Host", paths: Sequence[Path]) -> "list[Image]":
    """Remove them, as far as nothing uses them by now either."""
    from vmckpt.vm.images import files_of_domains, looked_at, remove_image

    removed = []
    for image in await looked_at(host, paths, await files_of_domains(host)):
        await remove_image(host, image)
        removed.append(image)
    return removed


def _loss(images: "Iterable[Image]", host: str) -> str:
    from vmckpt.units import format_size

    lines = [f"  {image.path} ({format_size(image.allocated_bytes)})" for image in images]
    return "\n".join([f"These images on {host} are removed for good:", *lines])


def own_loss(name: str, paths: Sequence[Path]) -> str:
    """What `vm rm --disks` will lose."""
    return f"'{name}' is removed for good, with its disks: {', '.join(map(str, paths)) or 'none'}."


async def remove_own(host: "Host", paths: Sequence[Path]) -> tuple[list[str], dict[str, str]]:
    """Remove images of a VM that is gone; those removed, and those kept with the reason.

    What stands outside a host's own state may be another host's too: it is removed only when every
    host says that it does not use it.
    """
    from vmckpt.errors import VmckptError
    from vmckpt.hosts.inventory import all_hosts
    from vmckpt.vm.images import FOLDER, files_of_domains, looked_at, remove_image

    removed, kept = list[str](), dict[str, str]()
    for path in paths:
        is_own = path.parent == host.state_dir / FOLDER
        try:
            for other in [] if is_own else all_hosts():
                for image in await looked_at(other, [path], await files_of_domains(other)):
                    if image.users:
                        kept[str(path)] = f"{', '.join(image.users)} on {other.name}"
            here = await looked_at(host, [path], await files_of_domains(host))
            if not here:
                kept[str(path)] = "it is no image file"
            for image in here:
                if image.users:
                    kept[str(path)] = ", ".join(image.users)
                elif str(path) not in kept:
                    await remove_image(host, image)
                    removed.append(str(path))
        except VmckptError as exc:
            kept[str(path)] = f"{exc.what}: {exc.why}"
    return removed, kept
