"""Alert rules and the dashboard: promtool plays the former, and both name metrics that exist."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric

from vmckpt.metrics.migrations import migrations
from vmckpt.metrics.replications import replications
from vmckpt.metrics.schedules import schedules
from vmckpt.metrics.vms import dirty_rates, hosts, vms

pytestmark = pytest.mark.contract
FOLDER = Path(__file__).parents[2] / "monitoring"
_NAME = re.compile(r"\bvmckpt_[a-z_]+\b")


def promtool(*words: str) -> None:
    program = os.environ["VMCKPT_TEST_PROMTOOL"]
    done = subprocess.run(
        [program, *words], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def known() -> Iterator[str]:
    families: list[Metric] = [
        *migrations([]), *replications([]), *schedules([]), *hosts({}), *vms([]), *dirty_rates([]),
    ]  # fmt: skip
    for family in families:
        yield from (family.name, f"{family.name}_total", f"{family.name}_bucket")


def test_the_rules_are_valid_and_fire_for_what_they_are_about() -> None:
    promtool("check", "rules", "alerts.yaml")
    promtool("test", "rules", "alerts_test.yaml")


def test_every_rule_is_played() -> None:
    alerts = re.findall(r"- alert: (\w+)", (FOLDER / "alerts.yaml").read_text())
    played = re.findall(r"alertname: (\w+)", (FOLDER / "alerts_test.yaml").read_text())
    assert set(alerts) == set(played)


@pytest.mark.parametrize("name", ["alerts.yaml", "dashboard.json"])
def test_every_metric_that_is_named_exists(name: str) -> None:
    named = set(_NAME.findall((FOLDER / name).read_text()))
    assert len(named) > 5
    assert named <= set(known())


def test_panels_do_not_overlap() -> None:
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for location in [panel["gridPos"]]
        for x in range(location["x"], location["x"] + location["w"])
        for y in range(location["y"], location["y"] + location["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
