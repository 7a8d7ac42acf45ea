"""The unit that keeps a VM protected is one that systemd takes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vmckpt.cli.main import command_line
from vmckpt.cli.nouns.replicate.replicate import app

TEMPLATES = Path(__file__).parents[2] / "ansible/roles/vmckpt/templates"
VALUES = {"ansible_managed": "test", "vmckpt_user": "root", "vmckpt_state_dir": "/var/lib/vmckpt"}


def rendered(name: str) -> str:
    text = (TEMPLATES / name).read_text()
    for variable, value in VALUES.items():
        text = text.replace(f"{{{{ {variable} }}}}", value)
    assert "{{" not in text
    return text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_it(tmp_path: Path) -> None:
    unit = rendered("vmckpt-replicate@.service.j2").replace("/usr/local/bin/vmckpt", "/bin/true")
    path = tmp_path / "vmckpt-replicate@web.service"
    path.write_text(unit)
    verify = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    path.write_text(unit.replace("Type=exec", "Type=never"))
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert "service type" in done.stderr  # it would have been found


def test_what_it_starts_is_a_command() -> None:
    (line,) = re.findall(
        r"^ExecStart=(.*)$", rendered("vmckpt-replicate@.service.j2"), re.MULTILINE
    )
    _, _, verb, name, hosts, options = line.split()
    assert (name, hosts, options) == ("%i", "$HOSTS", "$OPTIONS")
    assert CliRunner().invoke(app, [verb, "--help"]).exit_code == 0


def units_to_paste() -> dict[str, str]:
    """The units that docs/schedule.md has people paste, by name."""
    text = (TEMPLATES.parents[3] / "docs/schedule.md").read_text()
    found = re.findall(
        r"^    # /etc/systemd/system/(\S+?)(?:;.*)?\n((?:    .*\n)+)", text, re.MULTILINE
    )
    return {name: re.sub(r"^    ", "", lines, flags=re.MULTILINE) for name, lines in found}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_those_that_the_docs_have_for_schedules(tmp_path: Path) -> None:
    units = units_to_paste()
    assert sorted(units) == [
        "vmckpt-run-due.service",
        "vmckpt-run-due.timer",
        "vmckpt-scheduler.service",
    ]
    for name, text in units.items():
        for line in re.findall(r"^ExecStart=/usr/local/bin/vmckpt (.*)$", text, re.MULTILINE):
            words = line.split()
            assert CliRunner().invoke(command_line(words), [*words, "--help"]).exit_code == 0
        (tmp_path / name).write_text(text.replace("/usr/local/bin/vmckpt", "/bin/true"))
    paths = [str(tmp_path / name) for name in units]
    verify = ["systemd-analyze", "verify", "--man=no", *paths]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
