"""A standby that is lost, and a failover, of a real guest: each is notified of by who sees it."""

import json
import os
import shlex
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.test_replicate import (
    NAME,
    is_only_on,
    primary_qemu,
    promoted,
    protected,
    services,
)
from tests.qemu.world import World
from tests.waiting import eventually


def notified(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


@pytest.mark.timeout(300)
def test_who_sees_it_notifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "notified"
    # It takes longer than any event, and nothing waits for it.
    command = shlex.join(["sh", "-c", f"cat >>{out}; sleep 8"])
    monkeypatch.setenv("VMCKPT_NOTIFY_COMMAND", command)
    with protected("10.0") as (made, _):
        first = reported(out, 1)[0]
        assert (first["event"], first["host"], first["vm"]) == ("protected", "lab-a", NAME)
        assert first["machine"] == socket.gethostname()
        lose_the_standby(made, out)
        made.ok("replicate", "start", NAME, "lab-b")
        assert reported(out, 3)[2]["event"] == "protected"
        for pid in [*services(made, "primary"), primary_qemu(made)]:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: promoted(made), 30, "lab-b continues")
        last = reported(out, 4)[3]
        assert (last["event"], last["host"]) == ("failover", "lab-b")
        assert last["why"].startswith("took over from lab-a at epoch ")
        assert last["details"]["primary"] == "lab-a"
        assert last["id"] == f"{last['details']['run']}/failover"
        eventually(lambda: is_only_on(made, "lab-b"), 10, "one guest, on lab-b")
        assert len(notified(out)) == 4
        listing = made.ok("notify", "--undelivered")["undelivered"]
        assert [one["why"] for one in listing if "delivery" not in one["why"]] == []
        eventually(lambda: not made.ok("notify", "--undelivered")["undelivered"], 30, "all done")


def lose_the_standby(made: World, out: Path) -> None:
    for pid in services(made, "standby"):
        os.kill(pid, signal.SIGKILL)
    found = reported(out, 2)[1]
    assert (found["event"], found["host"]) == ("protection-lost", "lab-a")
    assert found["why"].startswith("alone: ")
    made.ok("replicate", "stop", NAME)


def reported(out: Path, count: int) -> list[dict[str, Any]]:
    eventually(lambda: len(notified(out)) >= count, 30, f"{count} notifications")
    return notified(out)
