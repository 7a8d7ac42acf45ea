"""What both services of a replication are told, and what they tell."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.codec import builtins
from vmckpt.errors import NotFoundError, UsageError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote.tls import TlsEndpoint
from vmckpt.lease.etcd_store import EtcdStore
from vmckpt.lease.file_store import FileStore
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.options.replication import ReplicationOptions
from vmckpt.replicate.arbiter import open_arbiter, require_location
from vmckpt.replicate.disks.copies import CopiedDisk
from vmckpt.replicate.operator.begin import last_error
from vmckpt.replicate.primary.stream import numbers_of
from vmckpt.replicate.request import REQUEST, ReplicationRequest, ServiceFiles, read_request
from vmckpt.vm.record import Platform


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    primary = LocalHost("a", tmp_path, "192.0.2.1", bridge="br0", migration_ports=(5, 9))
    request = ReplicationRequest(
        run="r1",
        vm="web",
        spec='name = "web"',
        platform=Platform("pc-q35-10.0", "tcg", "qemu64"),
        primary=primary,
        standby=LocalHost("b", Path("/b"), "192.0.2.2"),
        options=ReplicationOptions(
            "/leases", ("agent", "x"), epoch_s=None, holds_output=False, disks="shared"
        ),
        one_machine=False,
        qemu_id="0123abcd",
        disks=(CopiedDisk(0, 1 << 30), CopiedDisk(2, 512)),
        place=TlsEndpoint("192.0.2.2", 7, "ab", "cd"),
    )
    files = ServiceFiles.of(primary, "web")
    with pytest.raises(NotFoundError):
        read_request(files.path)
    files.path.mkdir(parents=True)
    files.request.write_text(REQUEST.encode(request))
    assert read_request(files.path) == request
    files.request.write_text(json.dumps(builtins(request) | {"format": 0}))
    with pytest.raises(NotFoundError):
        read_request(files.path)


def test_the_arbiter_is_a_directory_or_a_cluster() -> None:
    cluster = ReplicationOptions("etcd:http://192.0.2.1:2379,http://192.0.2.2:2379")
    assert isinstance(open_arbiter(ReplicationOptions("/leases")), FileStore)
    assert isinstance(open_arbiter(cluster), EtcdStore)
    for place in ("leases", "etcd:", "etcd:ftp://192.0.2.1"):
        with pytest.raises(UsageError):
            open_arbiter(ReplicationOptions(place))


@pytest.mark.parametrize("place", ["/leases", "etcd:http://192.0.2.1", "etcd:https://a,http://b"])
def test_credentials_go_to_no_place_where_others_read_them(place: str) -> None:
    with pytest.raises(UsageError, match="cannot be combined with"):
        require_location(ReplicationOptions(place, credentials="/etc/vmckpt/etcd.toml"))


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 20)), min_size=1))
def test_spans_are_the_pages_in_them(runs: list[tuple[int, int]]) -> None:
    spans = tuple((first * PAGE_BYTES, (first + length) * PAGE_BYTES) for first, length in runs)
    expected = [page for first, length in runs for page in range(first, first + length)]
    assert numbers_of(spans).tolist() == expected


def test_what_a_service_said_last_is_told_as_an_error() -> None:
    log = "noise\nerror: the disk is full\n  why: ENOSPC\n  do:  free space\n"
    assert last_error(log) == ("the disk is full: ENOSPC", "free space")
    assert last_error("killed\nby somebody") == ("killed; by somebody", "")
    assert last_error("") == ("", "")
