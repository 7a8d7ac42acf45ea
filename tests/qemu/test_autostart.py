"""VMs start with their machine: those that are set to, and each in its own right."""

from pathlib import Path

from tests.qemu.world import image, qemu, world

SPEC = """
name = "{name}"
memory = "64M"
{more}
[boot]
kernel = "{image}/vmlinuz"
initrd = "{image}/initrd"
cmdline = "console=ttyS0 quiet panic=-1 vk.id=1"
"""


def test_what_is_set_to_starts_with_the_machine() -> None:
    with world(qemu("10.0")) as made:
        made.ok("host", "set", "local", "--qemu", str(qemu("10.0")))

        def spec(name: str, more: str = "") -> Path:
            path = made.shared / f"{name}.toml"
            path.write_text(SPEC.format(name=name, more=more, image=image()))
            return path

        for name, more in (("one", "autostart = true"), ("two", ""), ("three", "")):
            made.ok("vm", "run", str(spec(name, more)), "--host", "local")
        made.ok("vm", "autostart", "three", "on")  # it runs
        assert made.ok("vm", "show", "three")["autostart"] is True
        for name in ("one", "two"):
            made.ok("vm", "stop", name, "--force")
        assert made.ok("vm", "start", "--autostart")["vms"] == [{"vm": "one", "error": None}]
        assert made.ok("vm", "start", "--autostart")["vms"] == []
        states = {vm["name"]: vm["state"] for vm in made.ok("vm", "list")["vms"]}
        assert states == {"one": "running", "two": "stopped", "three": "running"}

        # One that cannot be started hinders no other.
        for name in ("one", "three"):
            made.ok("vm", "stop", name, "--force")
        made.ok("vm", "autostart", "one", "on")
        text = (made.state_dir / "vms" / "one" / "spec.toml").read_text()
        assert text.count('"autostart" = true') == 1
        broken = text.replace("vmlinuz", "none")
        (made.state_dir / "vms" / "one" / "spec.toml").write_text(broken)
        done = made.vmckpt("vm", "start", "--autostart")
        assert done.code == 1
        one, three = done.result["vms"]
        assert (one["vm"], three) == ("one", {"vm": "three", "error": None})
        assert one["error"]["why"], one
        made.ok("vm", "autostart", "three", "off")
        made.ok("vm", "stop", "three", "--force")
        again = made.vmckpt("vm", "start", "--autostart")
        assert [vm["vm"] for vm in again.result["vms"]] == ["one"]
        for words in (["vm", "start"], ["vm", "start", "one", "--autostart"]):
            assert made.vmckpt(*words).code == 2
