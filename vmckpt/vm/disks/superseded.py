"""Recognize stale images that a VM left on a host when its standby took it over.

STATE/superseded/VM.json identifies the files by inode, size, time of the last write (mtime) and of
the last change (ctime): programs can set mtime back (cp -p, rsync -t), but only the kernel sets
ctime. A file that still matches is known to be a leftover, which another copy of the disk may
replace. A file that was written since, or is another one, is not.
"""

import json
from pathlib import Path

from vmckpt.errors import StorageError
from vmckpt.foreign import parse
from vmckpt.hosts.host import Host
from vmckpt.vm.disks.images import standby_users, used_besides
from vmckpt.vm.inventory import Vm

FORMAT = 1
_IDENTITY = "%i %s %.9Y %W %.9Z"


async def note_superseded(host: Host, stale: Vm) -> None:
    """Record the stale home's images in the host's own folder as leftovers.

    Raises HostDownError, StorageError.
    """
    own = [disk for disk in stale.spec.disks if not (disk.path.is_absolute() or disk.read_only)]
    images = {}
    for path in (disk.on(host.state_dir) for disk in own):
        if identity := await _identity(host, path):
            images[str(path)] = identity
    if images:
        record = _record(host, stale.name)
        await host.make_dir(record.parent)
        await host.write_text(record, json.dumps({"format": FORMAT, "images": images}))


async def is_superseded(host: Host, name: str, path: Path) -> bool:
    """Whether the file is such a leftover of that VM, without any other known user.

    Raises HostDownError, RefusedError if a VM's files on the host are damaged.
    """
    text = await host.read_text(_record(host, name))
    if text is None:
        return False
    try:
        known = parse(text)
        noted = known["images"].get(str(path)) if known["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise StorageError(
            f"{_record(host, name)} on {host.name} is damaged",
            why=f"{type(exc).__name__}: {exc}",
            remedy="remove it: images that it lists must then be removed by hand",
        ) from exc
    if noted is None or noted != await _identity(host, path):
        return False
    # The VM is elsewhere: records of it here are stale, or belong to this migration.
    return not await used_besides(host, path, standby_users(name))


def _record(host: Host, name: str) -> Path:
    return host.state_dir / "superseded" / f"{name}.json"


async def _identity(host: Host, path: Path) -> str | None:
    done = await host.run(["stat", "-c", _IDENTITY, "--", str(path)])
    return done.stdout.strip() if done.returncode == 0 else None
