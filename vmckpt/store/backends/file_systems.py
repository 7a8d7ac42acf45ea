"""Detect whether a directory's file system propagates locks between hosts.

On file systems that do not send locks to a server, the kernel grants them locally: they hold on
this host only. Such file systems are recognized by their types and mount options
(`/proc/self/mountinfo`, see proc_pid_mountinfo(5)); locking between two programs on this host is
tested.
"""

import errno
import fcntl
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

from vmckpt.procfs import lines, read_text

# Types whose locks never reach other hosts.
_UNKEPT = {
    "9p": "a 9p server grants every lock",
    "virtiofs": "virtiofs keeps locks within one guest, unless its server is configured otherwise",
    "vboxsf": "shared folders of VirtualBox have no locks",
    "vmhgfs": "shared folders of VMware have no locks",
    "prl_fs": "shared folders of Parallels have no locks",
    "afs": "AFS keeps locks of whole files only",
    "orangefs": "OrangeFS has no locks",
    "pvfs2": "PVFS has no locks",
    "beegfs": "BeeGFS keeps locks within one host, unless it is configured otherwise",
    "fuse": "a FUSE file system keeps locks within this host, unless its program does more",
}
# FUSE programs that propagate locks to all clients.
_KEPT_FUSE = ("fuse.glusterfs", "fuse.ceph", "fuse.moosefs", "fuse.juicefs")
# Mount options that disable lock propagation.
_UNKEPT_OPTIONS = (
    ("nfs", re.compile(r"nolock|local_lock=(all|posix)")),
    ("cifs", re.compile(r"nobrl|nolease_locks")),
    ("smb3", re.compile(r"nobrl")),
    ("lustre", re.compile(r"localflock|noflock")),
    ("ocfs2", re.compile(r"localflocks")),
    ("gfs2", re.compile(r"localflocks|lockproto=lock_nolock")),
)
_ESCAPE = re.compile(r"\\([0-7]{3})")
# struct flock of 64-bit Linux; a byte that no store locks (theirs are below 1 << 56).
_FLOCK, _TRIED_AT = struct.Struct("hhqqixxxx"), 1 << 60


class FileSystem(NamedTuple):
    """A mount: its type as the kernel calls it, and all mount options."""

    kind: str
    mounted_on: str
    options: tuple[str, ...]


def file_system_of(path: Path, mounts: str | None = None) -> FileSystem | None:
    """The file system of `path`, or of its existing part; None: unknown.

    `mounts`: the text of mountinfo. [default: this process's]
    """
    if mounts is None:
        try:
            mounts = read_text(Path("/proc/self/mountinfo"))
        except OSError:
            return None
    return mounted_at(os.path.realpath(path), mounts)


def mounted_at(where: str, mounts: str) -> FileSystem | None:
    """The file system of a path without symbolic links, by a host's mountinfo."""
    found: FileSystem | None = None
    for line in lines(mounts):
        left, dash, right = line.partition(" - ")
        words, more = left.split(" "), right.split(" ")
        if not dash or len(words) < 6 or len(more) < 3:
            continue
        point = _ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), words[4])
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        # Of two mounts on one directory the later one hides the other.
        if inside and (found is None or len(point) >= len(found.mounted_on)):
            options = (*words[5].split(","), *more[2].split(","))
            found = FileSystem(more[0], point, options)
    return found


def why_unkept(found: FileSystem) -> str | None:
    """Why other hosts do not see locks on it; None: they do, or it is local to this host."""
    if found.kind in _UNKEPT:
        return _UNKEPT[found.kind]
    if found.kind.startswith("fuse.") and found.kind not in _KEPT_FUSE:
        return _UNKEPT["fuse"]
    for kind, wrong in _UNKEPT_OPTIONS:
        if found.kind in (kind, f"{kind}4"):
            for option in found.options:
                if wrong.fullmatch(option):
                    return f"it is mounted with {option}: locks stay within this host"
                if option == "nocto":
                    return "it is mounted with nocto: what another host has just added is not seen"
    return None


def keeps_locks(path: Path) -> bool:
    """Whether a lock on this file excludes another open file description. Raises OSError."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _TRIED_AT, 1, 0)
    first = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        second = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not _locked(first, request):
                return True  # another program is doing the same test
            return not _locked(second, request)
        finally:
            os.close(second)
    finally:
        os.close(first)


def _locked(fd: int, request: bytes) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as exc:
        if exc.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
