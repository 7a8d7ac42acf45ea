"""The systemd units are ones that systemd accepts, and start commands that exist."""

import re
import shutil
import subprocess
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
        "vmckpt-autostart.service": ["vm start --autostart"],
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
