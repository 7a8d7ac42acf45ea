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

# What a plain `vmckpt migrate` imports before its QEMU starts, and what its job imports on a host.
COMMAND = """
import sys; before = set(sys.modules)
import vmckpt.cli.entry, vmckpt.cli.commands.moving, vmckpt.cli.found, vmckpt.ui.progress
import vmckpt.options.migration, vmckpt.drivers.find, vmckpt.migrate.locks, vmckpt.migrate.run
"""
JOB = """
import sys; before = set(sys.modules)
import vmckpt.cli.entry, vmckpt.cli.hidden.job, vmckpt.jobs.serve, vmckpt.migrate.elsewhere.job
"""
COUNT = """
ours = [name for name in sys.modules if name.split(".")[0] == "vmckpt"]
found = [one for name in ours for one in vars(sys.modules[name]).values()]
made = {one for one in found if isinstance(one, type) and "__dataclass_fields__" in vars(one)}
needless = {
    "typer", "click", "msgspec", "shlex", "shutil", "cryptography",
    "vmckpt.events.secrets", "vmckpt.hosts.sockets.arp", "vmckpt.hosts.sockets.heartbeats",
    "vmckpt.installing", "vmckpt.qemu.agent", "vmckpt.vm.disks.images",
    "vmckpt.vm.disks.superseded", "vmckpt.vm.passthrough.cards",
} & set(sys.modules) - before
print(len(ours), len(made), *needless)
"""


# Each module costs 0.05 ms, each dataclass 0.2 ms: see what was added, and whether every migration
# needs it at once (`later`), or only some (then it is imported there).
@pytest.mark.parametrize(("program", "modules", "classes"), [(COMMAND, 156, 12), (JOB, 176, 25)])
def test_a_migration_begins_with_little(program: str, modules: int, classes: int) -> None:
    words = [sys.executable, "-c", program + COUNT]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found, made, *needless = done.stdout.split()
    assert needless == []
    assert int(found) <= modules
    assert int(made) <= classes


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
