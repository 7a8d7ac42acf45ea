"""Two VMs that do not fit together: the second is refused, with figures, and the first lives."""

import pytest

from tests.qemu.test_checkpoint import guest
from tests.qemu.world import image, qemu, world
from vmckpt.lab.labguest import LabGuest

MIB = 1 << 20


@pytest.mark.timeout(300)
def test_memory_is_not_promised_twice() -> None:
    with world(qemu("10.0")) as made:
        ram = made.state("lab-a") / "ram"
        ram.mkdir()
        with made.small("lab-a", "ram", 300 * MIB):
            spec = guest().spec().replace("memory =", f'ram_dir = "{ram}"\nmemory =', 1)
            file = made.shared / "guest.toml"
            file.write_text(spec)
            made.ok("vm", "run", str(file), "--host", "lab-a")
            other = LabGuest("other", 2, image(), memory="192M", disk=None)
            second = made.shared / "other.toml"
            second.write_text(other.spec().replace("memory =", f'ram_dir = "{ram}"\nmemory =', 1))
            refused = made.vmckpt("vm", "run", str(second), "--host", "lab-a")
            assert refused.code == 4, refused
            assert "192.0 MiB" in refused.error["why"] or "192 MiB" in refused.error["why"]
            assert "overcommit" in refused.error["remedy"]
            assert len(made.qemus()) == 1
            # A fork's private pages count as well, and its shared ones.
            made.ok("checkpoint", "create", "guest", "--name", "point")
            copy = made.vmckpt("checkpoint", "restore", "point", "--as", "copy")
            assert copy.code == 4, copy
            # Who wants it all the same says so.
            text = second.read_text()
            second.write_text(text.replace("memory =", "overcommit = true\nmemory =", 1))
            made.ok("vm", "run", str(second), "--host", "lab-a")
            for name in ("other", "guest"):
                made.ok("vm", "stop", name, "--force")
                made.ok("vm", "rm", name)
