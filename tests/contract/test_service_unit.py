"""The unit that keeps a VM protected is one that systemd takes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vmckpt.cli.replicate import app

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
