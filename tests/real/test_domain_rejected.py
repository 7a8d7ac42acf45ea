"""Hosts that do not let a domain's migration be: it says why and what to do, and loses nothing."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.nobody import as_nobody
from tests.qemu.world import loaded, qemu
from tests.real.domains import GUEST, OWN_DISK, log, run_domain, secure, states
from tests.real.machines import Machines, machines
from tests.real.obstacles import another_key, full, known_hosts, replaced

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
IMAGES_BYTES = 48 << 20


@pytest.fixture(scope="module")
def made() -> Iterator[Machines]:
    """A domain on lab-a with a disk of its own, whose copy may fill the file system of lab-b."""
    with machines([qemu("10.0")] * 2) as one:
        secure(one)
        run_domain(one, "lab-a", disk=OWN_DISK)
        with one.small("lab-b", str(OWN_DISK.parent), IMAGES_BYTES):
            yield one


@pytest.fixture(autouse=True)
def stays_whole(made: Machines) -> Iterator[None]:
    """Whatever a test does, the domain runs on at lab-a, and nothing is left of the attempt."""
    yield
    assert states(made) == {"lab-a": "running"}
    assert made.ok("vm", "show", GUEST.name)["migration_cut_off"] is False
    assert made.files("lab-b") == []
    assert list(made.here("lab-b", OWN_DISK.parent).iterdir()) == []


def test_a_target_whose_key_is_not_known(made: Machines) -> None:
    path, (first, _) = known_hosts(made)
    with replaced(path, f"{first}\n"):
        refused = made.vmckpt("migrate", GUEST.name, "lab-b")
        assert refused.code == 6
        assert refused.error["what"] == "the SSH key of lab-b is not known"


@pytest.mark.parametrize("host", ["lab-a", "lab-b"])
def test_a_host_with_another_key_than_before(made: Machines, host: str) -> None:
    with another_key(made, host):
        refused = made.vmckpt("migrate", GUEST.name, "lab-b")
        assert refused.code == 6
        assert f"THE SSH KEY OF {host} HAS CHANGED" in refused.stderr


def test_a_user_whom_the_targets_libvirtd_does_not_let_in(made: Machines) -> None:
    entry = made.state_dir / "hosts/lab-b.json"
    wrapper = as_nobody(made.shared / "as-nobody", "vmckpt")
    with replaced(entry, json.dumps(json.loads(entry.read_text()) | {"vmckpt": wrapper})):
        refused = made.vmckpt("check", GUEST.name, "lab-b")
    assert refused.code == 4
    [check] = refused.result["targets"][0]["checks"]
    assert check["code"] == "reachable"
    assert "libvirt-sock on lab-b: Permission denied" in check["reason"]
    assert "group" in check["remedy"]


def test_a_target_without_room_for_its_disk(made: Machines) -> None:
    with full(made.here("lab-b", OWN_DISK.parent)):
        refused = made.vmckpt("migrate", GUEST.name, "lab-b")
        assert refused.code == 4
        assert "[disk-room]" in refused.error["why"]


def test_a_target_whose_disk_fills_up_while_it_is_copied(made: Machines) -> None:
    async def fills() -> str:
        async with loaded(made, GUEST) as control:
            since = log(made, "lab-a").stat().st_size
            command = made.begin("migrate", GUEST.name, "lab-b", "--bandwidth", "5MiB/s")
            try:
                while b"blockdev-mirror" not in log(made, "lab-a").read_bytes()[since:]:
                    assert command.poll() is None
                    await asyncio.sleep(0.01)
                with full(made.here("lab-b", OWN_DISK.parent)):
                    _, said = await asyncio.to_thread(command.communicate, timeout=120)
            finally:
                made.kill(command)
            await control.ping()
        assert command.returncode == 7, said
        return said

    said = asyncio.run(fills())
    assert "No space left" in said or "storage" in said, said
