"""Ranges of uids for VMs: who is in one, and whom a VM is."""

import uuid
from pathlib import Path

import pytest

from vmckpt.hosts.inventory.entries import entry_to_json, parse_entry
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.uids import Uids, parse_uids, taken
from vmckpt.vm.users.users import VmUser, uid_of

UIDS = Uids(1_000_000, 1_065_535)


def test_a_range_is_written_as_it_is_read() -> None:
    assert parse_uids("1000000-1065535") == UIDS
    assert str(UIDS) == "1000000-1065535"


@pytest.mark.parametrize(
    "text",
    ["", "1000000", "1000000-", "0-65536", "1000-100000", "1065535-1000000", "1000000-1065534",
     "2147400000-2147483648", "1000000 -1065535", "99999999999-999999999999"],
)  # fmt: skip
def test_what_is_no_range_for_vms_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a range|is not between|has fewer"):
        parse_uids(text)


def test_a_hosts_entry_keeps_the_range() -> None:
    host = LocalHost("a", Path("/a"), "127.0.0.1", vm_uids=UIDS)
    data = entry_to_json(host)
    assert data["vm_uids"] == (1_000_000, 1_065_535)
    assert parse_entry("a", data) == host
    # Entries of versions that had no such thing.
    del data["vm_uids"]
    assert parse_entry("a", data).vm_uids is None


@pytest.mark.parametrize("value", [[1, 2], [True, 2_000_000], ["1000000", "1065535"], "x", [1]])
def test_an_entry_with_no_such_range_is_malformed(value: object) -> None:
    data = entry_to_json(LocalHost("a", Path("/a"), "127.0.0.1")) | {"vm_uids": value}
    with pytest.raises(ValueError, match=r"vm_uids|is not between"):
        parse_entry("a", data)


def test_whom_a_range_belongs_to_already_is_found() -> None:
    accounts = [
        "root:x:0:0::/root:/bin/sh\nann:x:1000001:1000001::/:/bin/sh\n",
        "them:x:1065535:\n",
    ]
    subordinate = ["bob:65536:65536\nann:1065535:10\n", "damaged\nx:y:z\n"]
    assert taken(UIDS, accounts, subordinate) == [
        "ann (1000001)", "them (1065535)", "ann (1065535-1065544)",
    ]  # fmt: skip
    assert taken(UIDS, ["root:x:0:0::/root:/bin/sh\n", ""], ["bob:934464:65536\n"]) == []


def test_numbers_that_no_account_has_belong_to_no_one() -> None:
    """A host that was broken into ended `host check` of all hosts with "vmckpt has a bug"."""
    endless = "9" * 5000
    assert taken(UIDS, [f"x:x:{endless}:0\n"], [f"x:{endless}:65536\nx:1:{endless}\n"]) == []


def test_a_vm_is_the_same_user_wherever_the_range_is() -> None:
    users = {}
    for number in range(1000):
        identity = str(uuid.UUID(int=number))
        users[identity] = uid_of(identity, UIDS)
        assert UIDS.first < users[identity] < UIDS.last
        assert users[identity] == uid_of(identity, UIDS)
    assert len(set(users.values())) > 980


def test_a_qemu_is_started_without_rights() -> None:
    user = VmUser(1_000_007, UIDS, groups=(104,), taps=("vk0",))
    words = user.command(["qemu", "-S"])
    assert words[words.index("sh", 1) + 1] == "setpriv"
    assert {"--reuid=1000007", "--regid=1000007", "--groups=1000000,1065535,104"} < set(words)
    assert {"--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"} < set(words)
    assert words[-2:] == ["qemu", "-S"]
    assert VmUser.from_json(user.to_json(), Path("user.json")) == user._replace(groups=())
