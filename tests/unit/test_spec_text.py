"""A spec written out again is the same spec."""

from pathlib import Path

import pytest

from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.spec.spec_text import written

FULL = """
name = "web"
memory = "512M"
vcpus = 2
machine = "pc-q35-10.0"
accel = "tcg"
cpu = "qemu64,+aes"
guest_agent = true
ram_dir = "/dev/shm"
heartbeat_id = 7

[boot]
kernel = "vmlinuz"
initrd = "/images/in \\"quotes\\" and ümlaut"
cmdline = "console=ttyS0 a\\\\b"

[firmware]
code = "/usr/share/code.fd"
vars = "vars.fd"

[[disks]]
image = "web.qcow2"
size = "1G"

[[disks]]
path = "data.raw"
format = "raw"
read_only = true
cache = "writeback"

[[nics]]
network = "user"
isolated = true

[[nics]]
mac = "52:54:00:12:34:56"

[[devices]]
driver = "vmgenid"
guid = "auto"
nested = { list = [1, "two", false] }
"""
ADOPTED = """
name = "old"
memory = "64M"
[[disks]]
path = "/srv/a.qcow2"
node = "#block12"
[adopted]
arguments = ["-machine", "pc", "-drive", "{image:0},id=x"]
files = ["/srv/kernel"]
forwards = [2222]
"""


@pytest.mark.parametrize("text", [FULL, ADOPTED, 'name = "a"\nmemory = "16M"'])
def test_what_is_written_reads_as_it_was(text: str) -> None:
    spec = parse_spec(text, "first", Path("/specs"))
    again = parse_spec(written(spec), "second", Path("/elsewhere"))
    assert again._replace(text="") == spec._replace(text="")
