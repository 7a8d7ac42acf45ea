"""Locks of a store in a directory: tried, and only believed where all hosts hear of them."""

import fcntl
from pathlib import Path

import pytest

from tests.guest_like import memory, require_same, save
from vmckpt.errors import RefusedError
from vmckpt.store.backends import local
from vmckpt.store.backends.file_systems import FileSystem, file_system_of, keeps_locks, why_unkept
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.open import create_store, open_store

MOUNTS = r"""
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro
23 22 0:20 / /srv rw - xfs /dev/vdb rw
30 23 0:41 / /srv/nfs rw,relatime - nfs4 10.0.0.1:/x rw,vers=4.2,local_lock=none
31 23 0:42 / /srv/nolock rw - nfs 10.0.0.1:/x rw,vers=3,nolock,local_lock=all
38 23 0:49 / /srv/nocto rw - nfs4 10.0.0.1:/x rw,vers=4.2,nocto,local_lock=none
32 23 0:43 / /srv/a\040b rw - 9p share rw,trans=virtio
33 23 0:44 / /srv/ssh rw - fuse.sshfs me@there: rw
34 23 0:45 / /srv/gluster rw - fuse.glusterfs there:/v rw
35 23 0:46 / /srv/smb rw - cifs //there/x rw,nobrl
36 23 0:47 / /srv/twice rw - ext4 /dev/vdc rw
37 23 0:48 / /srv/twice rw - virtiofs share rw
not a line of it
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_kept"),
    [
        ("/var/lib/vmckpt", "ext4", True),
        ("/srv", "xfs", True),
        ("/srvx", "ext4", True),
        ("/srv/nfs/store", "nfs4", True),
        ("/srv/nolock/store", "nfs", False),
        ("/srv/nocto/store", "nfs4", False),
        ("/srv/a b", "9p", False),
        ("/srv/ssh/x/y", "fuse.sshfs", False),
        ("/srv/gluster/x", "fuse.glusterfs", True),
        ("/srv/smb", "cifs", False),
        ("/srv/twice", "virtiofs", False),
    ],
)
def test_which_file_systems_keep_locks(path: str, kind: str, is_kept: bool) -> None:
    found = file_system_of(Path(path), MOUNTS)
    assert found is not None
    assert (found.kind, why_unkept(found) is None) == (kind, is_kept)


def test_this_machines_own_are_known_and_tried(tmp_path: Path) -> None:
    found = file_system_of(tmp_path)
    assert found is not None
    assert why_unkept(found) is None
    (tmp_path / "file").touch()
    assert keeps_locks(tmp_path / "file")


def test_a_store_on_a_file_system_without_locks_is_read_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, ram = str(tmp_path / "store"), memory(16, 1)
    with create_store(location) as store:
        manifest = save(store, ram)
    monkeypatch.setattr(local, "file_system_of", lambda _: FileSystem("9p", "/srv", ()))
    with open_store(location) as store:
        require_same(store, manifest, ram)
        for writes in (lambda: save(store, ram), lambda: collect(store, plan_gc(store))):
            with pytest.raises(RefusedError, match="does not keep locks: 9p") as told:
                writes()
            assert "VMCKPT_STORE_ONE_HOST=1" in told.value.remedy
        with pytest.raises(RefusedError):
            store.remove([manifest.id])
    monkeypatch.setenv("VMCKPT_STORE_ONE_HOST", "1")
    with open_store(location) as store:
        store.remove([manifest.id])


def test_a_lock_that_is_given_twice_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = str(tmp_path / "store")
    create_store(location).close()
    # As some servers do: yes to whatever is asked.
    monkeypatch.setattr(fcntl, "fcntl", lambda *_: 0)
    monkeypatch.setenv("VMCKPT_STORE_ONE_HOST", "1")
    with open_store(location) as store, pytest.raises(RefusedError, match="does not keep locks"):
        save(store, memory(16, 1))
