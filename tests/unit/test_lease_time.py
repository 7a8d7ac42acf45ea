"""How long a lease may be: bounds that follow from what is waited for elsewhere."""

from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt.cli.options.replicate_options import ReplicateArguments
from vmckpt.epoch.guard import ANSWER_S
from vmckpt.epoch.load import LOAD_TIMEOUT_S
from vmckpt.errors import UsageError
from vmckpt.hosts.local import LocalHost
from vmckpt.lease import etcd_store
from vmckpt.lease.record import LeaseSpan
from vmckpt.options.replication import LONGEST_LEASE_S, SHORTEST_LEASE_S, ReplicationOptions
from vmckpt.replicate.fencing.agent import TIMEOUT_S
from vmckpt.replicate.operator.sides import BEGIN_S
from vmckpt.replicate.primary.brake import SLOT_S
from vmckpt.replicate.primary.keeper import CHECK_S, GIVEN_UP_S, MARGIN_S, RETRY_S
from vmckpt.replicate.primary.protection import TAKING_S
from vmckpt.replicate.status import ReplicaStatus, Role
from vmckpt.ui.replication import _lease

HERE, THERE = (LocalHost(name, Path("/s"), "127.0.0.1") for name in "ab")


@pytest.mark.parametrize(
    ("text", "lease_s"), [("2500ms", 2.5), ("3s", 3.0), ("10s", 10.0), (None, 3.0)]
)
def test_it_is_what_was_asked_for(text: str | None, lease_s: float) -> None:
    options = ReplicateArguments(lease_time=text).options(HERE, THERE)
    options.require_sense(one_machine=True)
    assert options.lease_s == lease_s


def test_it_stays_as_it_was_at_the_last_start() -> None:
    last = ReplicationOptions("/leases", lease_s=7.0)
    assert ReplicateArguments().options(HERE, THERE, last).lease_s == 7.0
    assert ReplicateArguments(lease_time="5s").options(HERE, THERE, last) == replace(
        last, lease_s=5.0
    )


@pytest.mark.parametrize("text", ["0s", "2s", "2499ms", "11s", "1h"])
def test_what_cannot_be_kept_is_refused(text: str) -> None:
    options = ReplicateArguments(lease_time=text).options(HERE, THERE)
    with pytest.raises(UsageError) as caught:
        options.require_sense(one_machine=True)
    assert "from 2.5 s to 10 s" in caught.value.why


def test_the_shortest_lasts_over_a_question_without_an_answer() -> None:
    """It is renewed when a third is over: after a time limit it can be asked for once more."""
    left_s = LeaseSpan(SHORTEST_LEASE_S).holder_s * 2 / 3 - MARGIN_S
    assert left_s > CHECK_S + etcd_store.TIMEOUT_S + RETRY_S
    # The guest is held within the margin, and the brake's pause ends before the next renewal.
    assert MARGIN_S > ANSWER_S
    assert left_s > SLOT_S


def test_the_longest_is_over_before_a_standby_is_given_up() -> None:
    """A primary that is replaced keeps its guest until a standby that cannot go on has said so.

    That one waits for the lease at most, while it fences, and then tries to load the guest.
    """
    longest_s = LeaseSpan(LONGEST_LEASE_S).claimant_s
    assert max(TIMEOUT_S, longest_s) + LOAD_TIMEOUT_S < GIVEN_UP_S
    assert longest_s + LOAD_TIMEOUT_S < BEGIN_S
    assert TAKING_S < GIVEN_UP_S


def test_status_shows_it() -> None:
    status = ReplicaStatus(role=Role.PRIMARY, state="protected")
    assert _lease(replace(status, lease_s=2.5, arbiter="/leases")) == [
        ("lease", "2.5 s, renewed every 0.83 s, at /leases")
    ]
    assert _lease(status) == []
