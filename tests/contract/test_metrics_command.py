"""`vmckpt metrics` and `vmckpt replay` as processes, where there is little to tell."""

import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.commands import COMMAND, vmckpt
from vmckpt.events.record import RunRecord

pytestmark = pytest.mark.contract


def test_metrics_of_a_machine_without_vms(tmp_path: Path) -> None:
    done = vmckpt(tmp_path, "metrics")
    assert (done.returncode, done.stderr) == (0, "")
    (up,) = text_string_to_metric_families(done.stdout)
    assert [(s.name, s.labels, s.value) for s in up.samples] == [
        ("vmckpt_host_up", {"host": "local"}, 1)
    ]
    file = tmp_path / "vmckpt.prom"
    assert vmckpt(tmp_path, "metrics", "--textfile", str(file)).stdout == ""
    assert file.read_text() == done.stdout
    nowhere = vmckpt(tmp_path, "metrics", "--textfile", str(tmp_path / "none/vmckpt.prom"))
    assert (nowhere.returncode, "No such file" in nowhere.stderr) == (11, True)


def test_metrics_are_served_until_ctrl_c(tmp_path: Path) -> None:
    serving = subprocess.Popen(
        [*COMMAND, "metrics", "serve", "--listen", "127.0.0.1:0"],
        env=os.environ | {"VMCKPT_STATE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stderr is not None
        url = serving.stderr.readline().removeprefix("serving ").strip()
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert b'vmckpt_host_up{host="local"} 1' in answer.read()
        taken = vmckpt(tmp_path, "metrics", "serve", "--listen", url.split("/")[2])
        assert (taken.returncode, "choose another" in taken.stderr) == (4, True)
        serving.send_signal(signal.SIGINT)
        assert serving.communicate(timeout=30) == ("", "")
        assert serving.returncode == 0
    finally:
        serving.kill()
        serving.communicate()
    assert vmckpt(tmp_path, "metrics", "serve", "--listen", "here").returncode == 2
    no_name = vmckpt(tmp_path, "metrics", "serve", "--listen", "a..b:0")  # "vmckpt has a bug"
    assert (no_name.returncode, "cannot listen on a..b:0" in no_name.stderr) == (4, True)


POLICY = '[[when]]\nstalls = 2\ndo = "throttle"\nby_percent = 20\nmost_percent = 40\n'


def test_a_policy_is_replayed_over_a_migration_and_nothing_else(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    samples = [
        {"at_s": n / 10, "round": n, "remaining_bytes": 100 if n == 1 else 50, "status": "active"}
        for n in range(1, 9)
    ]
    requests: list[tuple[str, dict[str, Any]]] = [
        ("moved", {"vm": "web", "max_downtime_ms": 300}),
        ("other", {"vm": "web"}),
    ]
    for name, request in requests:
        RunRecord(name, "migrate", request, samples=samples).save(tmp_path / "runs")
    done = vmckpt(tmp_path, "replay", "moved", "--policy", str(policy))
    assert done.returncode == 0
    assert "slowing" in done.stdout
    assert "by 40 %" in done.stdout
    told = json.loads(vmckpt(tmp_path, "replay", "moved", "--policy", str(policy), "--json").stdout)
    assert [one["throttle_percent"] for one in told["decisions"]] == [20, 40]
    refused = vmckpt(tmp_path, "replay", "other", "--policy", str(policy))
    assert (refused.returncode, "is not a migration" in refused.stderr) == (2, True)
