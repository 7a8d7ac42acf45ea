"""A disk that forgets, at a power cut, whatever was not synced to it.

While it records, the program's own calls (os.fsync, os.rename, ...) are followed, and the commands
that it has a host run, sync(1) among them. Before each of them, and at the end, the power may be
cut. Two disks bound what a file system may do with what was not synced:

    ORDERED     names are kept at once, contents only when their file is synced (XFS, ext4
                without auto_da_alloc): a file that was renamed and never synced is empty
    FORGETFUL   names too are kept only when their directory is synced (POSIX promises no more)
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vmckpt.hosts.host import Completed
from vmckpt.hosts.local import LocalHost

ORDERED, FORGETFUL = "ordered", "forgetful"
# An image of a directory: what each file has, by its path; None is a directory.
Image = dict[str, bytes | None]
# Disks of guests are no records.
MOST_BYTES = 1 << 20


@dataclass
class _Node:
    """A file's synced content, or a directory's synced names."""

    content: bytes = b""
    names: dict[str, "_Node"] | None = None


@dataclass
class Disk:
    """What would be there after a power cut, of everything below `root`."""

    root: Path
    cuts: list[tuple[str, Image]] = field(default_factory=list)
    _nodes: dict[int, _Node] = field(default_factory=dict)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Follow this process for the block. What is there at its beginning counts as synced."""
        self._sync_all(self.root)
        followed: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
            "fsync": (os.fsync, self._synced),
            "fdatasync": (os.fdatasync, self._synced),
            "rename": (os.rename, self._nothing),
            "replace": (os.replace, self._nothing),
            "link": (os.link, self._nothing),
            "mkdir": (os.mkdir, self._nothing),
            "rmdir": (os.rmdir, self._nothing),
            "unlink": (os.unlink, self._nothing),
            "remove": (os.remove, self._nothing),
        }
        for name, (call, after) in followed.items():
            setattr(os, name, self._following(name, call, after))
        run = LocalHost.run

        async def run_followed(host: LocalHost, argv: Sequence[str], *args: Any) -> Completed:
            self._cut(f"{argv[0]} {argv[-1]}")
            done = await run(host, argv, *args)
            self._forget_removed()
            if argv[0] == "sync":
                for path in map(Path, argv[2:]):
                    self._sync(path)
            return done

        setattr(LocalHost, "run", run_followed)  # noqa: B010 - a method of that type to mypy
        try:
            yield
        finally:
            setattr(LocalHost, "run", run)  # noqa: B010
            for name, (call, _) in followed.items():
                setattr(os, name, call)
        self._cut("the end")

    def _following(
        self, name: str, call: Callable[..., Any], after: Callable[..., None]
    ) -> Callable[..., Any]:
        def followed(*args: Any, **kwargs: Any) -> Any:
            self._cut(f"{name} {args[0]}")
            done = call(*args, **kwargs)
            after(*args)
            return done

        return followed

    def _nothing(self, *_: Any) -> None:
        self._forget_removed()

    def _synced(self, fd: Any, *_: Any) -> None:
        path = Path(f"/proc/self/fd/{fd if isinstance(fd, int) else fd.fileno()}").readlink()
        if path == self.root or self.root in path.parents:
            self._sync(path)

    def _sync_all(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            for below in path.iterdir():
                self._sync_all(below)
        self._sync(path)

    def _sync(self, path: Path) -> None:
        node = self._node(path)
        if path.is_dir():
            node.names = {below.name: self._node(below) for below in path.iterdir()}
        elif _is_record(path):
            node.content = path.read_bytes()

    def _node(self, path: Path) -> _Node:
        new = _Node(names={} if path.is_dir() and not path.is_symlink() else None)
        return self._nodes.setdefault(path.lstat().st_ino, new)

    def _forget_removed(self) -> None:
        """An inode's number may be given to another file; directories keep what they had."""
        there = {path.lstat().st_ino for path in (self.root, *self.root.rglob("*"))}
        for gone in self._nodes.keys() - there:
            del self._nodes[gone]

    def _cut(self, before: str) -> None:
        for disk in (ORDERED, FORGETFUL):
            image: Image = {}
            if disk == ORDERED:
                for path in self.root.rglob("*"):
                    if path.is_dir() and not path.is_symlink():
                        image[str(path.relative_to(self.root))] = None
                    elif _is_record(path):
                        image[str(path.relative_to(self.root))] = self._node(path).content
            else:
                self._remembered(self._node(self.root), "", image)
            if not self.cuts or self.cuts[-1][1] != image:
                self.cuts.append((f"{disk}, before {before}", image))

    def _remembered(self, node: _Node, at: str, image: Image) -> None:
        for name, below in (node.names or {}).items():
            path = f"{at}/{name}" if at else name
            if below.names is None:
                image[path] = below.content
            else:
                image[path] = None
                self._remembered(below, path, image)


def _is_record(path: Path) -> bool:
    state = path.lstat()
    return stat.S_ISREG(state.st_mode) and state.st_size <= MOST_BYTES


def lay_out(image: Image, root: Path) -> None:
    """What is found there after the power cut, in a new directory."""
    root.mkdir()
    for name, content in sorted(image.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)
