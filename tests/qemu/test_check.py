"""`vmckpt check`: every target asked, and what only the running QEMU or the network knows."""

import json
import subprocess

from tests.qemu.world import image, qemu, world
from vmckpt.lab.guests.labguest import LabGuest


def verdicts(answer: dict[str, object]) -> dict[str, tuple[str, str]]:
    checks = answer["checks"]
    assert isinstance(checks, list)
    return {check["code"]: (check["verdict"], check["reason"]) for check in checks}


def kinds(answer: dict[str, object]) -> list[tuple[str, str]]:
    return [(code, verdict) for code, (verdict, _) in verdicts(answer).items()]


def test_several_targets_are_asked_at_once() -> None:
    guest = LabGuest("one", 1, image(), machine="pc-q35-7.2", disk=None)
    with world(qemu("10.0"), qemu("7.2"), qemu("10.0")) as made:
        made.run_guest(guest, "lab-a")
        silent = made.state_dir / "hosts" / "silent.json"
        entry = {"state_dir": "/none", "migration_address": "127.0.0.1", "enter": ["false"]}
        silent.write_text(json.dumps(entry))
        done = made.vmckpt("check", "one", "lab-b", "lab-c", "lab-a", "silent")
        assert done.code == 4
        result = done.result
        assert (result["vm"], result["source"]) == ("one", "lab-a")
        answers = {answer["target"]: answer for answer in result["targets"]}
        possible = {name: answer["possible"] for name, answer in answers.items()}
        assert possible == {"lab-b": True, "lab-c": True, "lab-a": False, "silent": False}
        assert verdicts(answers["lab-b"])["way-back"][0] == "warn"
        assert verdicts(answers["lab-c"])["way-back"][0] == "ok"
        assert verdicts(answers["lab-a"])["same-host"][0] == "refuse"
        assert verdicts(answers["silent"])["reachable"][0] == "refuse", answers["silent"]
        # What `check` says of the usual options is what `migrate --dry-run` says.
        dry = made.ok("migrate", "one", "lab-b", "--dry-run")
        assert dry.keys() == result.keys()
        (answer,) = dry["targets"]
        assert (answer["target"], dry["possible"], result["possible"]) == ("lab-b", True, False)
        assert kinds(answer) == kinds(answers["lab-b"])
        words = ("one", "lab-b", "--method", "stop", "--compress", "zstd")
        assert made.vmckpt("check", *words).code == made.vmckpt("migrate", *words, "--dry-run").code
        assert made.vmckpt("check", "one", "lab-b", "lab-c").code == 0
        assert made.vmckpt("check", "one", "lab-b", "nowhere").code == 3


def test_what_is_in_the_way_is_named() -> None:
    guest = LabGuest("one", 1, image(), disk=None)
    with world(qemu("10.0"), qemu("10.0")) as made:
        spec = made.state_dir / "one.toml"
        devices = '[[devices]]\ndriver = "nvme"\nid = "fast"\nserial = "1"\n'
        spec.write_text(guest.spec() + devices)
        made.ok("vm", "run", str(spec), "--host", "lab-a")
        enter = made.lab.host("lab-b").enter
        subprocess.run([*enter, "ip", "link", "del", "br0"], check=True)
        done = made.vmckpt("check", "one", "lab-b")
        assert done.code == 4
        found = verdicts(done.result["targets"][0])
        refused = {code: reason for code, (verdict, reason) in found.items() if verdict == "refuse"}
        assert refused.keys() == {"bridge", "migratable"}
        assert "'br0'" in refused["bridge"]
        assert refused["migratable"].startswith("the nvme 'fast' (PCI 0000:00:0")
        assert made.vmckpt("migrate", "one", "lab-b").code == 4
        assert made.files("lab-b") == []
