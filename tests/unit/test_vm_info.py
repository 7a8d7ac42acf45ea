"""What is told of a VM, whichever driver it has."""

import pytest

from vmckpt.drivers.driver import VmInfo
from vmckpt.vm.spec.spec import Placement

pytestmark = pytest.mark.unit
OWN = VmInfo(
    "web", "a", "qemu", "running", None, False, "vmckpt", (), None, False, False, 1, 1 << 20,
    "q35", "tcg", "qemu64", Placement(apart=("web",)), 7, ("/d",), "/console", "/qmp",
)  # fmt: skip
DOMAIN = OWN._replace(
    driver="libvirt", pid=None, console_log=None, qmp_socket=None, uuid="1",
    persistent=False,
)  # fmt: skip


def test_programs_hear_what_its_driver_tells() -> None:
    own, domain = OWN.to_json(), DOMAIN.to_json()
    assert own.keys() - domain.keys() == set()
    assert domain.keys() - own.keys() == {"uuid", "persistent"}
    assert (own["cannot"], own["disks"], own["ended"]) == ([], ["/d"], None)
    assert own["placement"]["apart"] == ("web",)


@pytest.mark.parametrize(
    ("state", "is_on"),
    [("running", True), ("paused", True), ("unreachable", True), ("stopped", False),
     ("crashed", False), ("nostate", False)],
)  # fmt: skip
def test_one_that_is_off_takes_no_memory(state: str, *, is_on: bool) -> None:
    assert OWN._replace(state=state).is_on is is_on
