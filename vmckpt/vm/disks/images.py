"""Images in a host's own folder, and what uses each, so that unused ones can be removed.

An image is in use if a VM, a checkpoint service, a replication or a running operation names it, by
whatever path, or if another image needs it: as its backing file, or for its data.
"""

import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

from vmckpt.codec import convert
from vmckpt.errors import NotFoundError, RefusedError, StorageError, UsageError, VmckptError
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.hosts.processes.other_user import become
from vmckpt.jobs.files import DIRECTORY, JobFiles, jobs_dir
from vmckpt.vm.disks.backing import base_of_its_own, malformed, named_by
from vmckpt.vm.disks.shared_storage import is_shared
from vmckpt.vm.paths import vm_dir, vms_dir
from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.users.path_user import path_user, remove_as

if TYPE_CHECKING:
    from vmckpt.vm.domains.definition.description import ImageFile

FOLDER = "images"
# The mode as a number: in words it depends on the host's language.
_STAT = "%d:%i %s %b %B %f %h"
# Files of a VM's directory that name images.
_SPEC = "spec.toml"
_NAMING = (_SPEC, "vm.json", "restore.json", "migration.json", "aside/request.json")
# Kinds of job that make or read checkpoints.
_OF_CHECKPOINTS = ("checkpoint", "restore", "restore-disks", "fork")
# Folders of operations that name images, what the operations are, and the file in each one's
# folder.
_OPERATIONS = (
    ("replicas", "replication of", "request.json"),
    *((f"{DIRECTORY}/{kind}", f"{kind} run", "order.json") for kind in _OF_CHECKPOINTS),
    ("left", "cleanup of", ""),
)


class File(NamedTuple):
    """A file's identity, whatever path leads to it; or that of one of its names."""

    identity: str
    size_bytes: int
    allocated_bytes: int


class HostImage(NamedTuple):
    """A file in the folder; `users` says what needs it, empty: no known user."""

    path: Path
    size_bytes: int
    allocated_bytes: int
    users: tuple[str, ...]


async def images_of(host: Host, domains: Mapping[str, Iterable["ImageFile"]]) -> list[HostImage]:
    """The images in the host's folder, by name. `domains`: the files of libvirt's domains.

    Raises RefusedError if a VM's files are damaged, HostDownError.
    """
    folder = host.state_dir / FOLDER
    return await inspected(host, [folder / name for name in await host.list_dir(folder)], domains)


async def inspected(
    host: Host,
    paths: Iterable[Path],
    domains: Mapping[str, Iterable["ImageFile"]],
    *,
    disks_only: bool = False,
    by_name: bool = False,
) -> list[HostImage]:
    """The images at these paths, without missing and non-regular files.

    With `disks_only` only what has one as its disk, or is based on it, uses it; not what names a
    file of its name in any record. With `by_name` what uses another name (a hard link) of the file
    does not count: it loses nothing with this one. Raises as `images_of` does.
    """
    identified = partial(_files, host, by_name=by_name)
    files = await identified(paths)
    beside = [
        folder / name
        for folder in dict.fromkeys(path.parent for path in files)
        for name in await host.list_dir(folder)
    ]
    users: dict[str, set[str]] = defaultdict(set)
    formats: dict[str, set[str]] = defaultdict(set)
    reached = {
        path: _Reached(f"image {path.name}", file.identity)
        for path, file in (await identified(beside)).items()
    }
    texts = await _vm_texts(host)
    for user, path, kind in [*_named(texts, host), *_of_domains(domains)]:
        for where, file in (await identified([path])).items():
            users[file.identity].add(user)
            formats[file.identity].add(kind)
            reached.setdefault(where, _Reached(user, file.identity))
    if not disks_only:
        for user, text, _ in texts:
            for path, file in files.items():
                if _mentions(text, path):
                    users[file.identity].add(user)
        for user, checkpoint in await _being_read(host):
            for path, file in files.items():
                if checkpoint in path.name:  # future forks are based on it, even if there are none
                    users[file.identity].add(user)
    raw = {one for one, kinds in formats.items() if kinds == {"raw"}}
    await _add_needed(host, reached, users, identified, raw)
    return [
        HostImage(path, file.size_bytes, file.allocated_bytes, tuple(sorted(users[file.identity])))
        for path, file in files.items()
    ]


async def used_besides(host: Host, path: Path, own: Collection[str]) -> bool:
    """Whether anything on the host except `own` (as in `HostImage.users`) uses the file at `path`.

    Operations that clean up after a VM in `own` do not count. Raises as `images_of` does.
    """
    cleanups = tuple(f"cleanup of {user.partition(' ')[2]}." for user in own)
    found = await inspected(host, [path], await files_of_domains(host))
    users = {user for image in found for user in image.users}
    return any(not (user in own or user.startswith(cleanups)) for user in users)


async def disk_of_others(host: Host, path: Path, own: Collection[str]) -> list[str]:
    """Whose disk the file is, or is below, besides `own` (as in `HostImage.users`).

    Unlike `used_besides`, which counts more. Raises as `images_of` does.
    """
    found = await inspected(host, [path], await files_of_domains(host), disks_only=True)
    users = {user for image in found for user in image.users}
    return sorted(users - {*own})


async def used_elsewhere(
    host: Host, path: Path, own: Collection[str] = (), *, but: str = ""
) -> list[str]:
    """What uses the file besides `own` (as in `HostImage.users`) on hosts that reach it, too.

    That is where they have it by the same path, or in their own folder. Hosts that do not answer,
    and `but`, are not asked.
    """
    is_own = path.parent == host.state_dir / FOLDER

    async def users(other: Host) -> list[str]:
        there = other.state_dir / FOLDER / path.name if is_own else path
        if not await other.exists(there) or (await is_shared(host, other, path, there))[0] is False:
            return []
        try:
            return await disk_of_others(other, there, own)
        except RefusedError as exc:
            return [f"unknown ({exc.why})"]

    async def named(other: Host) -> list[str]:
        return [f"{user} on {other.name}" for user in await users(other)]

    others = [one for one in all_hosts() if one.name not in (host.name, but)]
    return [user for found in (await ask_every(others, named)).given for user in found]


def standby_users(name: str) -> tuple[str, ...]:
    """The users (as in `HostImage.users`) of a VM's copies on its standby."""
    return f"VM {name}", f"replication of {name}"


async def files_of_domains(host: Host) -> dict[str, list["ImageFile"]]:
    """What the host's libvirt domains use, disks above all.

    Raises HostDownError if libvirtd is silent.
    """
    if host.libvirt is None:
        return {}
    from vmckpt.vm.domains.definition.description import files_in
    from vmckpt.vm.domains.inventory import all_domains

    found = await all_domains([host])
    if found.silent:
        raise found.silent[0]
    return {domain.name: files_in(domain.seen.xml) for domain in found.given}


async def unused(host: Host, names: Iterable[str], *, every: bool = False) -> list[HostImage]:
    """The images of these names in the host's folder; with `every` also all unused ones.

    Raises NotFoundError, RefusedError: one of the named images is in use.
    """
    there = [
        image._replace(users=image.users or tuple(await used_elsewhere(host, image.path)))
        for image in await images_of(host, await files_of_domains(host))
    ]
    wanted = [chosen(there, name) for name in dict.fromkeys(names)]
    if used := [image for image in wanted if image.users]:
        raise RefusedError(
            f"{used[0].path} on {host.name} is in use",
            why=", ".join(used[0].users),
            remedy="remove what uses it first; nothing was removed",
        )
    if every:
        wanted += [image for image in there if not image.users and image not in wanted]
    return wanted


async def remove_images(host: Host, paths: Iterable[Path]) -> list[HostImage]:
    """Remove images; returns those removed. Raises as `remove_image` does."""
    removed = []
    for image in await inspected(host, paths, await files_of_domains(host)):
        await remove_image(host, image)
        removed.append(image)
    return removed


async def remove_own(host: Host, paths: Iterable[Path]) -> tuple[list[str], dict[str, str]]:
    """Remove images of a VM that is gone; returns those removed, and those kept with the reason.

    The base of a forked domain's disk goes with it. An image outside a host's own folder may also
    belong to another host: it is removed only if every host says that it does not use it. One
    inside may if hosts share these folders.
    """
    removed, kept = list[str](), dict[str, str]()
    waiting = [*paths]
    for path in waiting:
        is_own = path.parent == host.state_dir / FOLDER
        try:
            for other in [] if is_own else all_hosts():
                domains = await files_of_domains(other)
                for image in await inspected(other, [path], domains, by_name=True):
                    if image.users:
                        kept[str(path)] = f"{', '.join(image.users)} on {other.name}"
            if is_own and (users := await used_elsewhere(host, path)):
                kept[str(path)] = ", ".join(users)
            here = await inspected(host, [path], await files_of_domains(host), by_name=True)
            base = await base_of_its_own(host, path)
            if not here:
                kept[str(path)] = "it is not an image file"
            for image in here:
                if image.users:
                    kept[str(path)] = ", ".join(image.users)
                elif str(path) not in kept:
                    await remove_image(host, image)
                    removed.append(str(path))
                    waiting += [base] if base else []
        except VmckptError as exc:
            kept[str(path)] = f"{exc.what}: {exc.why}"
    return removed, kept


async def remove_image(host: Host, image: HostImage) -> None:
    """Remove an image that is not in use, and has not come into use meanwhile.

    It is renamed first, so that a VM being created no longer finds it. A VM that was recorded
    before is then seen, and the image gets its name back. Raises RefusedError, StorageError.
    """
    if image.users:
        raise _in_use(host, image, image.users)
    user = await path_user(host, image.path)
    real = await host.resolve(image.path)
    apart = real.with_name(f".removed-{os.urandom(4).hex()}-{real.name}")
    await _rename(host, real, apart, user)
    texts = await _vm_texts(host)
    found = [
        one.user for one in texts if any(_mentions(one.text, name) for name in (real, image.path))
    ]
    # A fork that has found it as its base names it only in its own images.
    found += [user for user, read in await _being_read(host) if read in image.path.name]
    if not found:
        await remove_as(host, user, apart)
        return
    await _rename(host, apart, real, user)
    raise _in_use(host, image, dict.fromkeys(found))


def _in_use(host: Host, image: HostImage, users: Iterable[str]) -> RefusedError:
    return RefusedError(
        f"{image.path} on {host.name} is in use",
        why=", ".join(users),
        remedy="only what nothing uses is removed: see `vmckpt host images`",
    )


async def _rename(host: Host, old: Path, new: Path, user: int | None) -> None:
    """As `user`, who may replace it; None: root alone may."""
    words = ["mv", "-n", "-T", "--", str(old), str(new)]
    done = await host.run(words if user is None else become(user, [user], words))
    if done.returncode or await host.exists(old):
        raise StorageError(
            f"cannot rename {old} to {new.name} on {host.name}",
            why=done.stderr.strip() or f"{new.name} is there",
            remedy="check the permissions of its directory; a file whose name begins with "
            ".removed- was an image: rename it by hand if a VM needs it",
        )


def chosen(images: Iterable[HostImage], name: str) -> HostImage:
    """Select an image by name or path. Raises NotFoundError."""
    for image in images:
        if name in (image.path.name, str(image.path)):
            return image
    raise NotFoundError(
        f"there is no image '{name}'",
        why="it is not in the host's folder of images",
        remedy="see `vmckpt host images`",
    )


async def _files(host: Host, paths: Iterable[Path], *, by_name: bool) -> dict[Path, File]:
    """The regular files among the paths, links followed; missing ones are left out."""
    found = {}
    words = [str(path) for path in paths]
    for start in range(0, len(words), 500):
        some = words[start : start + 500]
        done = await host.run(["stat", "-L", "--printf", f"{_STAT}\\0%n\\0", "--", *some])
        parts = done.stdout.split("\0")
        for facts, name in zip(parts[::2], parts[1::2], strict=False):
            try:
                identity, *numbers, mode, links = facts.split(" ")
                size, blocks, block_bytes = map(int, numbers)
                is_one_of_several = by_name and int(links) > 1
                is_file = stat.S_ISREG(int(mode, 16))
            except ValueError as exc:
                raise malformed(host, "stat", facts) from exc
            if is_file and is_one_of_several:
                identity += f" {await host.resolve(Path(name))}"
            if is_file:
                found[Path(name)] = File(identity, size, blocks * block_bytes)
    return found


class _VmText(NamedTuple):
    """The content of a record of a VM or an operation, and its owner."""

    user: str
    text: str
    is_spec: bool


async def _vm_texts(host: Host) -> list[_VmText]:
    """The records of the host's VMs, replications and running operations."""
    files: list[tuple[str, Path]] = []
    for name in await host.list_dir(vms_dir(host.state_dir)):
        directory = vm_dir(host.state_dir, name).path
        inside = await host.list_dir(directory)
        naming = [*_NAMING, *(f"{one}/argv.json" for one in inside if one.startswith("qemu-"))]
        files += [(f"VM {name}", directory / one) for one in naming]
    for folder, what, ending in _OPERATIONS:
        for name in await host.list_dir(host.state_dir / folder):
            path = host.state_dir / folder / name
            files.append(
                (f"{what} {name.removesuffix('.json')}", path / ending if ending else path)
            )
    texts = [(user, await host.read_text(path), path.name == _SPEC) for user, path in files]
    return [_VmText(user, text, is_spec) for user, text, is_spec in texts if text]


class _ReaderRequest(TypedDict):
    """The part of a job's request that names the checkpoint it reads (a fork has it in `wish`)."""

    checkpoint: NotRequired[str | None]
    wish: NotRequired["_ReaderRequest | None"]


class _ReaderOrder(TypedDict):
    request: NotRequired[_ReaderRequest | None]


class _ReaderOutcome(TypedDict):
    is_over: bool


async def _being_read(host: Host) -> list[tuple[str, str]]:
    """The checkpoints being read by runs on the host, with these runs."""
    found = []
    for kind in _OF_CHECKPOINTS:
        for run in await host.list_dir(jobs_dir(host.state_dir, kind)):
            job = JobFiles.of(host.state_dir, kind, run)
            order, outcome = await host.read_text(job.order), await host.read_text(job.outcome)
            with suppress(MalformedError):
                request = convert(_ReaderOrder, parse(order or "{}")).get("request") or {}
                wish = request.get("wish") or {}
                checkpoint = request.get("checkpoint") or wish.get("checkpoint")
                is_over = convert(_ReaderOutcome, parse(outcome))["is_over"] if outcome else False
                if checkpoint and not is_over:
                    found.append((f"{kind} run {run}", checkpoint))
    return found


def _named(texts: Iterable[_VmText], host: Host) -> Iterator[tuple[str, Path, str]]:
    """The disks that specs name, wherever they are, and their formats. A spec that cannot be read
    may name any image.
    """
    for user, text in ((one.user, one.text) for one in texts if one.is_spec):
        directory = vm_dir(host.state_dir, user.removeprefix("VM "))
        try:
            spec = parse_spec(text, str(directory.spec), directory.path)
        except UsageError as exc:
            raise RefusedError(
                f"what uses the images of {host.name} is not known",
                why=f"{exc.what}: {exc.why}",
                remedy=exc.remedy,
            ) from exc
        yield from ((user, disk.on(host.state_dir), disk.format) for disk in spec.disks)
        yield from ((user, path, "raw") for path in spec.files)
        yield from (
            (user, directory.overlays / f"disk{number}.qcow2", "qcow2")
            for number in range(len(spec.disks))
        )


def _of_domains(
    domains: Mapping[str, Iterable["ImageFile"]],
) -> Iterator[tuple[str, Path, str]]:
    for name, files in domains.items():
        yield from ((f"domain {name}", *file) for file in files)


class _Reached(NamedTuple):
    """Who needs a file, and which it is."""

    user: str
    identity: str


async def _add_needed(
    host: Host,
    reached: Mapping[Path, _Reached],
    users: dict[str, set[str]],
    identified: Callable[[Iterable[Path]], Awaitable[dict[Path, File]]],
    raw: Collection[str],
) -> None:
    """What an image needs, its backing file say, is used by the image's users; recursively.

    Of `raw` ones, by identity, a guest has written all: what a header there says is not believed.
    """
    seen, waiting = set[Path](), list(reached.items())
    while waiting:
        path, (user, identity) = waiting.pop()
        if path in seen or identity in raw:
            continue
        seen.add(path)
        needed = {one.path: one.is_raw for one in await named_by(host, path)}
        for where, file in (await identified(needed)).items():
            users[file.identity].add(user)
            if not needed[where]:
                waiting.append((where, _Reached(user, file.identity)))


def _mentions(text: str, path: Path) -> bool:
    """Whether a text names the file, by its name or a path to it.

    In a record the name is spelled as JSON has it, in a text in a record so once more.
    """
    name = path.name
    in_record = json.dumps(name)[1:-1]
    spellings = dict.fromkeys((name, in_record, json.dumps(in_record)[1:-1]))
    any_of = "|".join(map(re.escape, spellings))
    return re.search(rf"(?<![\w.-])(?:{any_of})(?![\w.-])", text) is not None
