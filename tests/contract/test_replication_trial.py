"""What a standby would need to take over, tried by it at the start."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.errors import HostDownError, OperationFailedError, RefusedError, UsageError
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.store import NONE_YET
from vmckpt.options.replication import ReplicationOptions
from vmckpt.replicate.fencing.agent import this_machine
from vmckpt.replicate.standby.trial import try_means
from vmckpt.replicate.wire.messages import Hello, Process

HELLO = Hello(
    vm="web",
    holder="a/run",
    host="a",
    machine="another machine",
    ram_bytes=1 << 20,
    emitters=(Process(4242, 1),),
)


@pytest.fixture
def options(tmp_path: Path) -> ReplicationOptions:
    """A place where the primary holds term 3."""
    store = FileStore(tmp_path)
    asyncio.run(store.replace("web", LeaseRecord(3, "a/run", 1, LeaseSpan(1.0)), over=NONE_YET))
    return ReplicationOptions(str(tmp_path))


def tried(options: ReplicationOptions, hello: Hello = HELLO, term: int = 3) -> None:
    primary = SimpleNamespace(name="a")
    request: Any = SimpleNamespace(options=options, vm="web", primary=primary)
    asyncio.run(try_means(request, hello, term))


def test_who_reads_the_primarys_term_may_be_its_standby(options: ReplicationOptions) -> None:
    tried(options)


def test_who_reads_another_place_may_not(options: ReplicationOptions, tmp_path: Path) -> None:
    for hello, term in (
        (HELLO, 4),
        (replace(HELLO, holder="b/run"), 3),
    ):
        with pytest.raises(RefusedError, match="read different leases"):
            tried(options, hello, term)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(RefusedError) as refused:
        tried(ReplicationOptions(str(elsewhere)))
    assert "the standby reads nothing" in refused.value.why


def test_an_arbiter_that_is_down_or_knows_us_not_is_found_out(options: ReplicationOptions) -> None:
    with pytest.raises(HostDownError):
        tried(replace(options, arbiter="etcd:http://127.0.0.1:1"))
    with pytest.raises(UsageError, match="credentials"):
        tried(replace(options, arbiter="etcd:https://127.0.0.1:1", credentials="/nowhere"))


def test_the_agent_has_to_check_the_host_that_it_would_fence(
    options: ReplicationOptions, tmp_path: Path
) -> None:
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n[ "$1" = a ]\n')
    agent.chmod(0o755)
    tried(replace(options, fence=(str(agent), "{host}")))
    assert (tmp_path / "asked").read_text() == "a check\n"
    with pytest.raises(OperationFailedError, match="failed to check a"):
        tried(replace(options, fence=(str(agent), "b")))
    with pytest.raises(OperationFailedError, match="failed to check"):
        tried(replace(options, fence=("/nowhere/agent",)))


def test_the_agent_is_given_no_name_that_the_primary_chose(
    options: ReplicationOptions, tmp_path: Path
) -> None:
    """With `ssh {host}` a name that is an option of ssh would run a command on the standby."""
    agent = tmp_path / "agent"
    agent.write_text(
        f'#!/bin/sh\necho "$@" $VMCKPT_FENCE_HOST $VMCKPT_FENCE_VM >{tmp_path}/asked\n'
    )
    agent.chmod(0o755)
    hostile = replace(HELLO, host="-oProxyCommand=touch /tmp/x", vm="db")
    tried(replace(options, fence=(str(agent), "{host}")), hostile)
    assert (tmp_path / "asked").read_text() == "a check a web\n"


def test_a_primary_that_claims_to_be_on_this_machine_has_its_agent_checked(
    options: ReplicationOptions,
) -> None:
    """An agent is given only between machines: on one it is refused."""
    here = replace(HELLO, machine=this_machine())
    with pytest.raises(OperationFailedError, match="failed to check a"):
        tried(replace(options, fence=("/bin/false",)), here)


def test_on_one_machine_no_agent_is_asked(options: ReplicationOptions) -> None:
    tried(options, replace(HELLO, machine=this_machine()))
