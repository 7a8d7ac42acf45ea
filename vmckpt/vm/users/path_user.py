"""Whose path a file has. What another user may replace there, root removes as that user alone.

The owner of a directory on the way to an image, or of a link, can have the path lead anywhere, at
any moment.
"""

from pathlib import Path

from vmckpt.errors import StorageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.other_user import become

# Of a directory and a symbolic link, in the first column; the owner is the second.
_LEADS_ON, _MODE_LENGTH = ("d", "l"), 10
_MOST_DIGITS = 10


async def path_user(host: Host, path: Path) -> int | None:
    """The first user on the way to `path`, links followed, who is not trusted with more.

    Trusted are root and the owners of the state directory (hosts/ownership.py). None: there is no
    other, or vmckpt is not root there, and may do no more than such a user. Raises StorageError: it
    is not known.
    """
    if await host.user_id() != 0:
        return None
    trusted = {"root", *await _owners(host, host.state_dir)}
    for owner in await _owners(host, path):
        if owner not in trusted:
            return await _uid(host, path, owner)
    return None


async def _owners(host: Host, path: Path) -> list[str]:
    """Of the directories and links on the way, in order.

    Raises StorageError also if others than their owners may replace what is in one of them.
    """
    shown = await host.run(["namei", "-l", "--", str(path)])
    owners = list[str]()
    for line in filter(str.strip, shown.stdout.splitlines()):
        mode, *words = line.split()
        if mode.startswith(_LEADS_ON) and len(mode) == _MODE_LENGTH and words:
            owners.append(words[0])
            group = words[1] if len(words) > 1 else ""
            if mode.startswith("d") and _is_open(mode, group):
                raise _unknown(host, path, f"others may write a directory on the way: {line}")
    if not owners:
        raise _unknown(host, path, shown.stderr.strip() or "namei says nothing")
    return owners


def _is_open(mode: str, group: str) -> bool:
    """Whether others than a directory's owner may replace files of one another in it."""
    is_sticky = mode[-1] in "tT"
    return not is_sticky and (mode[8] == "w" or (mode[5] == "w" and group != "root"))


async def remove_as(host: Host, user: int | None, path: Path) -> None:
    """Remove a file, if it is there, with the rights of its `path_user`. Raises StorageError."""
    if user is None:
        # Not in words, which depend on the host's language; nor of what a link leads to.
        is_directory = '[ -d "$1" ] && [ ! -L "$1" ]'
        found = await host.run(["sh", "-c", is_directory, "sh", str(path)])
        if found.returncode == 0:
            raise StorageError(
                f"{path} on {host.name} is not removed",
                why="it is a directory, not an image",
                remedy="see what is there, and remove it if nothing needs it",
            )
        await host.remove(path)
        return
    done = await host.run(become(user, [user], ["rm", "-f", "--", str(path)]))
    if done.returncode:
        raise StorageError(
            f"cannot remove {path} on {host.name}",
            why=f"tried as uid {user}, who may replace it: {done.stderr.strip()}",
            remedy="see what is there, and remove it if it is the image",
        )


async def _uid(host: Host, path: Path, name: str) -> int:
    """By its name; one without an account is a number already."""
    output = (await host.run(["id", "-u", "--", name])).stdout.strip() or name
    if not output.isdecimal() or len(output) > _MOST_DIGITS:
        raise _unknown(host, path, f"there is no user '{name}'")
    return int(output)


def _unknown(host: Host, path: Path, why: str) -> StorageError:
    return StorageError(
        f"it is not known who may replace {path} on {host.name}",
        why=why,
        remedy="see what is there, and remove it if it is the image",
    )
