"""What `vmckpt top` shows of the facts that it has."""

from typing import Any

from vmckpt.ui.top import frame

VM: dict[str, Any] = {
    "name": "web",
    "host": "lab-a",
    "state": "running",
    "vcpus": 2,
    "memory_bytes": 256 << 20,
    "operation": None,
    "dirty_rate": None,
    "replication": None,
    "guard": None,
    "checkpoints": None,
    "next_checkpoint": None,
}
FACTS: dict[str, Any] = {
    "at_unix_s": 1000.0,
    "hosts": [{"name": "lab-a", "free_bytes": 1 << 30}, {"name": "lab-b", "free_bytes": None}],
    "vms": [VM, VM | {"name": "off", "state": "stopped"}],
    "silent": [],
}


def line(text: str, begin: str) -> list[str]:
    """The cells of the line that begins so."""
    found = next(line for line in text.splitlines() if line.startswith(begin))
    return [cell for cell in found.split("  ") if cell]


def test_hosts_have_what_runs_on_them_and_silence_is_no_zero() -> None:
    cells = line(frame(FACTS), "lab-a")
    assert [cell.strip() for cell in cells] == ["lab-a", "yes", "2", "1", "256 MiB", "1.00 GiB"]
    silent = [cell.strip() for cell in line(frame(FACTS), "lab-b")]
    assert silent == ["lab-b", "no", "0", "0", "0 B", "?"]


def test_a_vm_without_anything_has_dashes() -> None:
    assert [cell.strip() for cell in line(frame(FACTS), "web")][5:] == ["-", "-", "-", "-"]


def test_what_protects_a_vm_and_what_does_not_is_said() -> None:
    replication = {
        "state": "protected",
        "standby": "lab-b",
        "rpo_now_ms": 31.6,
        "output_commit": False,
        "answers": True,
    }
    busy = VM | {
        "operation": "migrate to lab-b",
        "dirty_rate": {"at_unix_s": 940.0, "bytes_per_s": 20 * 2**20},
        "replication": replication,
        "guard": {"run": "r1", "phase": "watching"},
        "checkpoints": {"count": 3, "last_unix_s": 998.0},
    }
    text = frame(FACTS | {"vms": [busy]})
    for words in (
        "migrate to lab-b",
        "20.0 MiB/s, 1m00s ago",
        "protected by lab-b, 32 ms behind, OUTPUT NOT HELD; guard r1: watching",
        "3, 2 s ago",
    ):
        assert words in text
    gone = busy | {"replication": replication | {"answers": False, "output_commit": True}}
    text = frame(FACTS | {"vms": [gone]})
    assert "its service is silent; guard" in text
    assert "NOT HELD" not in text
    over = {"state": "promoted", "standby": None, "rpo_now_ms": None, "output_commit": None}
    text = frame(FACTS | {"vms": [VM | {"replication": over | {"answers": False}}]})
    assert line(text, "web")[7].strip() == "unprotected"


def test_the_next_checkpoint_is_told() -> None:
    following = {"next_unix_s": 1090.0, "failures": 0}
    there = {"count": 3, "last_unix_s": 998.0}
    cases = [
        (following, there, "3, 2 s ago; next in 1m30s"),
        (following | {"next_unix_s": 1000.0, "failures": 2}, None, "next is due (2 failed)"),
    ]
    for one, points, words in cases:
        vm = VM | {"next_checkpoint": one, "checkpoints": points}
        assert frame(FACTS | {"vms": [vm]}).rstrip().endswith(words)


def test_no_vms_and_silent_hosts_are_said() -> None:
    silent = [{"what": "lab-b is down", "why": "no route"}]
    text = frame(FACTS | {"vms": [], "silent": silent})
    assert "no VMs" in text
    assert text.endswith("incomplete: lab-b is down: no route")
