"""What `replicate start` is asked, and what it makes of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faulty_host import FaultyHost
from vmckpt.cli.options.replicate_options import DisksChoice, ReplicateArguments
from vmckpt.errors import RefusedError, UsageError
from vmckpt.hosts.local import LocalHost
from vmckpt.options.replication import ReplicationOptions

NOTHING = ReplicateArguments()


HERE, THERE = (LocalHost(name, Path("/s"), "127.0.0.1") for name in "ab")
FAR = FaultyHost("c", Path("/s"), "192.0.2.1", is_this_machine=False)


def test_on_one_machine_all_has_a_default() -> None:
    options = NOTHING.options(HERE, THERE)
    assert options == ReplicationOptions(options.arbiter)
    assert options.arbiter.endswith("/leases")


def test_between_machines_somebody_has_to_say_where_leases_are() -> None:
    with pytest.raises(RefusedError, match="no arbiter"):
        NOTHING.options(HERE, FAR)
    assert NOTHING._replace(lease="/shared").options(HERE, FAR).arbiter == "/shared"


def test_an_agent_is_used_between_machines_and_refused_on_one() -> None:
    wishes = NOTHING._replace(lease="/l", fence="agent 'one word' {host}")
    assert wishes.options(HERE, FAR).fence == ("agent", "one word", "{host}")
    kept(wishes, FAR)
    with pytest.raises(RefusedError, match="one machine"):
        kept(wishes, THERE)
    for text in ("", "  ", "'"):
        with pytest.raises(UsageError, match="not a command"):
            wishes._replace(fence=text).options(HERE, FAR)


def kept(wishes: ReplicateArguments, standby: LocalHost) -> ReplicationOptions:
    """What they come to with that standby, as `start` looks at it."""
    options = wishes.options(HERE, standby)
    options.require_sense(one_machine=standby.is_this_machine)
    return options


def test_a_password_in_an_address_is_neither_recorded_nor_shown() -> None:
    with pytest.raises(UsageError, match="has a user or a password") as refused:
        kept(NOTHING._replace(lease="etcd:https://a:2379,https://vmckpt:secret@b:2379"), FAR)
    assert "secret" not in str(refused.value) + refused.value.why + refused.value.remedy


@pytest.mark.parametrize("epoch", ["2s", "60s", "1h"])
def test_output_is_held_for_long_by_no_accident(epoch: str) -> None:
    wishes = NOTHING._replace(epoch=epoch)
    with pytest.raises(RefusedError) as refused:
        kept(wishes, THERE)
    assert "--unsafe-no-output-commit" in refused.value.remedy
    assert not kept(wishes._replace(unsafe_no_output_commit=True), THERE).holds_output
    kept(wishes._replace(epoch="1s"), THERE)
    assert kept(wishes._replace(epoch="auto"), THERE).epoch_s is None


@pytest.mark.parametrize(
    "wrong",
    [NOTHING._replace(epoch="0ms"), NOTHING._replace(epoch="2h"), NOTHING._replace(max_pause="1m")],
)
def test_what_cannot_be_kept_is_refused(wrong: ReplicateArguments) -> None:
    with pytest.raises(UsageError, match="cannot be kept"):
        kept(wrong, THERE)


def test_what_is_not_said_is_as_it_was_but_for_what_is_unsafe() -> None:
    last = ReplicationOptions("/l", ("agent",), 0.05, 0.02, holds_output=False, credentials="")
    shared = replace(last, disks="shared")
    assert NOTHING.options(HERE, FAR, shared).disks == "shared"
    assert NOTHING._replace(disks=DisksChoice.copy).options(HERE, FAR, shared).disks == "copy"
    again = NOTHING.options(HERE, FAR, last)
    assert again == replace(last, holds_output=True)
    etcd = "etcd:https://192.0.2.1"
    moved = NOTHING._replace(lease=etcd, lease_credentials="/etc/c").options(HERE, FAR, last)
    assert (moved.arbiter, moved.credentials, moved.fence) == (etcd, "/etc/c", ("agent",))
