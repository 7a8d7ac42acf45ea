"""What `vmckpt schedule add` does not take."""

from pathlib import Path

import pytest

from vmckpt.cli.main import command_line
from vmckpt.cli.options.schedule_options import local_zone
from vmckpt.errors import UsageError


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--every", "soon"],
        ["--every", "10ms"],
        ["--every", "1h", "--cron", "0 * * * *"],
        ["--every", "1h", "--rpo", "2h"],
        ["--every", "1h", "--jitter", "40m"],
        ["--every", "auto", "--jitter", "1m"],
        ["--cron", "0 * * *"],
        ["--cron", "0 12 * * *", "--window", "22:00-06:00"],
        ["--every", "1h", "--window", "night"],
        ["--every", "1h", "--timezone", "Mars/Olympus"],
        ["--every", "1h", "--catch-up", "twice"],
        ["--every", "1h", "--kind", "internal"],
        ["--every", "1h", "--name", "No Name"],
        ["--every", "1h", "--check", "0%"],
        ["--every", "1h", "--check", "1/7"],
    ],
)
def test_what_cannot_be_meant_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    with pytest.raises(UsageError):
        command_line(["schedule"])(["schedule", "add", "web", *words], standalone_mode=False)
    assert not (tmp_path / "schedules").exists()


def test_the_time_zone_is_the_machine_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert local_zone() == "Asia/Tokyo"
    monkeypatch.setenv("TZ", ":Europe/Berlin")
    assert local_zone() == "Europe/Berlin"
