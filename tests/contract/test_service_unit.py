"""The systemd units are ones that systemd accepts, and start commands that exist."""

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vmckpt.cli.main import command_line

FOLDER = Path(__file__).parents[2] / "units"
UNITS = sorted(path for path in FOLDER.iterdir() if path.is_file())
COMMAND = re.compile(r"^Exec(?:Start=|Stop=timeout .* )vmckpt (.*)$", re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_accepts_them(tmp_path: Path) -> None:
    paths = []
    for unit in UNITS:
        path = tmp_path / unit.name.replace("@", "@web")
        path.write_text(re.sub(r"\bvmckpt (?=[a-z])", "/bin/true ", unit.read_text()))
        paths.append(path)
    verify = ["systemd-analyze", "verify", "--man=no", *map(str, paths)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wrong = paths[0].read_text().replace("[Service]", "[Service]\nType=never")
    paths[0].write_text(wrong)
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert "service type" in done.stderr  # it would have been found


def test_each_starts_a_command_that_exists() -> None:
    started = {unit.name: COMMAND.findall(unit.read_text()) for unit in UNITS}
    assert started == {
        "vmckpt-autostart.service": ["vm start --autostart --retry 10m"],
        "vmckpt-drain.service": ["drain local --reason shutdown $OPTIONS"],
        "vmckpt-metrics.service": ["metrics serve"],
        "vmckpt-replicate@.service": ["replicate keep %i $HOSTS $OPTIONS"],
        "vmckpt-run-due.service": ["schedule run-due"],
        "vmckpt-run-due.timer": [],
        "vmckpt-scheduler.service": ["serve --scheduler"],
        "vmckpt-undrain.service": ["undrain local --reason shutdown $UNDRAIN_OPTIONS"],
    }
    for lines in started.values():
        for line in lines:
            words = [word for word in line.split() if word[0] not in "%$"]
            assert CliRunner().invoke(command_line(words), [*words, "--help"]).exit_code == 0


@pytest.mark.skipif(shutil.which("dh_installsystemd") is None, reason="there is no debhelper")
def test_an_upgrade_starts_no_vms(tmp_path: Path) -> None:
    """To restart vmckpt-autostart is to start VMs that an operator has stopped since the boot."""
    rules = (FOLDER.parent / "debian/rules").read_text().replace("\\\n", "")
    commands = re.findall(r"^\t(dh_installsystemd .*)$", rules, re.MULTILINE)
    for name in ("control", "changelog"):
        (tmp_path / "debian").mkdir(exist_ok=True)
        shutil.copy(FOLDER.parent / "debian" / name, tmp_path / "debian")
    units = tmp_path / "debian/vmckpt/lib/systemd/system"
    units.mkdir(parents=True)
    for unit in UNITS:
        shutil.copy(unit, units)
    for command in commands:
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    parts = [path for path in (tmp_path / "debian").rglob("*") if path.is_file()]
    scripts = "".join(path.read_text() for path in parts if path.name.startswith("p"))
    acts = [pair for pair in pairwise(scripts.splitlines()) if "deb-systemd-invoke" in pair[1]]
    assert any("vmckpt-scheduler.service" in line for _, line in acts)
    for name in ("vmckpt-autostart", "vmckpt-drain", "vmckpt-undrain"):
        assert all('"$1" = remove ' in when for when, line in acts if name in line)


def test_what_a_unit_starts_for_good_outlives_it() -> None:
    """QEMUs, jobs, what loads a guest's memory, and deliveries of notifications."""
    for unit in UNITS:
        text = unit.read_text()
        if "[Service]" in text and unit.name != "vmckpt-metrics.service":
            assert "\nKillMode=process\n" in text, unit.name


def test_drop_ins_order_units_that_exist() -> None:
    names = {unit.name for unit in UNITS}
    found = [path for path in FOLDER.rglob("*") if path.is_file() and path not in UNITS]
    assert [str(path.relative_to(FOLDER)) for path in found] == [
        "session-.scope.d/vmckpt-drain.conf"
    ]
    for path in found:
        before = re.findall(r"^Before=(.*)$", path.read_text(), re.MULTILINE)
        assert before
        assert set(before) <= names
