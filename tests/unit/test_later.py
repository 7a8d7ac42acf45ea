"""What a migration loads when: nothing before its memory moves that only its end needs."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

PROGRAM = """
import sys
import vmckpt.migrate.migration
from vmckpt.migrate import later
there = lambda name: "vmckpt.migrate." + name in sys.modules
assert not there("steps.transfer") and not there("steps.arrival")
later.load_to_send()
assert there("steps.transfer") and there("steps.listen")
assert not there("steps.arrival") and not there("report")
later.load_to_arrive()
assert all(map(there, ("steps.arrival", "steps.handover", "outcome.recover", "report")))
assert "shutil" in sys.modules
"""


def test_what_the_end_needs_is_loaded_after_what_sends() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_what_is_missing_is_told_where_memory_can_still_be_called_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vmckpt.migrate import later

    monkeypatch.setattr(later, "_TO_ARRIVE", ("vmckpt.migrate.nowhere",))
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        later.load_to_arrive()
