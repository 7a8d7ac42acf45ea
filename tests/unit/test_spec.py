"""Specs: what a full one means, and that every mistake names its line and its key."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import UsageError
from vmckpt.units import GIB, MIB
from vmckpt.vm.adopted.holes import ram_names
from vmckpt.vm.create import read_spec
from vmckpt.vm.spec.spec import Boot, Disk, Firmware, Nic, Placement, Spec, anchored, parse_spec

BASE = Path("/srv/specs")
SMALL = 'name = "web"\nmemory = "512M"\n'
FULL = """\
name = "web-1.prod"
memory = "2GiB"
vcpus = 4
machine = "pc-q35-7.2"
accel = "tcg"
cpu = "qemu64,+aes"
guest_agent = true
ram_dir = "/dev/hugepages"
autostart = true
heartbeat_id = 7

[boot]
kernel = "vmlinuz"
initrd = "/boot/initrd"
cmdline = "console=ttyS0 quiet"

[firmware]
code = "/usr/share/OVMF/OVMF_CODE.fd"
vars = "vars.fd"

[[disks]]
path = "root.qcow2"
size = "10G"

[[disks]]
path = "/images/data.raw"
format = "raw"
read_only = true
cache = "writeback"

[[nics]]
mac = "52:54:00:AB:cd:ef"

[[nics]]
network = "user"

[[devices]]
driver = "virtio-rng-pci"
addr = "0x10"

[placement]
apart = ["web"]
together = ["shop"]
hosts = ["a", "b"]
"""


def parse(text: str) -> Spec:
    return parse_spec(text, "web.toml", BASE)


def test_a_full_spec_is_read_whole() -> None:
    spec = parse(FULL)
    assert spec == Spec(
        name="web-1.prod",
        memory_bytes=2 * GIB,
        vcpus=4,
        machine="pc-q35-7.2",
        accel="tcg",
        cpu="qemu64,+aes",
        boot=Boot(BASE / "vmlinuz", Path("/boot/initrd"), "console=ttyS0 quiet"),
        firmware=Firmware(Path("/usr/share/OVMF/OVMF_CODE.fd"), BASE / "vars.fd"),
        disks=(
            Disk(BASE / "root.qcow2", "qcow2", 10 * GIB, False, "none", "disk0"),
            Disk(Path("/images/data.raw"), "raw", None, True, "writeback", "disk1"),
        ),
        nics=(Nic("bridge", "52:54:00:ab:cd:ef"), Nic("user", None)),
        devices=({"driver": "virtio-rng-pci", "addr": "0x10"},),
        passthrough=(),
        guest_agent=True,
        sandbox=True,
        ram_dir=Path("/dev/hugepages"),
        autostart=True,
        overcommit=False,
        heartbeat_id=7,
        placement=Placement(("web",), ("shop",), ("a", "b")),
        adopted=None,
        text=FULL,
    )


def test_two_keys_are_enough() -> None:
    spec = parse(SMALL)
    assert (spec.name, spec.memory_bytes, spec.vcpus) == ("web", 512 * MIB, 1)
    assert (spec.machine, spec.accel, spec.cpu) == ("q35", "auto", "auto")
    assert (spec.boot, spec.firmware, spec.heartbeat_id) == (None, None, None)
    assert not spec.disks
    assert not spec.nics
    assert not spec.devices
    assert spec.ram_dir == Path("/dev/shm")
    assert spec.guest_agent is False


MALFORMED = [
    # (what is wrong, text, line, key, a word of the reason)
    ("a missing name", 'memory = "1G"\n', 1, "name", "missing"),
    ("a missing memory", 'name = "web"\n', 1, "memory", "missing"),
    ("a name with a space", 'memory = "1G"\nname = "the web"\n', 2, "name", "[A-Za-z0-9]"),
    ("a name with a slash", 'name = "../web"\nmemory = "1G"\n', 1, "name", "[A-Za-z0-9]"),
    ("a name that is too long", f'name = "{"x" * 41}"\nmemory = "1G"\n', 1, "name", "40"),
    ("a name that is a number", 'name = 7\nmemory = "1G"\n', 1, "name", "text in quotes"),
    ("memory without a unit's text", 'name = "web"\nmemory = 512\n', 2, "memory", "text in quotes"),
    ("memory that is not a size", 'name = "web"\nmemory = "a line"\n', 2, "memory", "'a line'"),
    ("too little memory", 'name = "web"\nmemory = "8M"\n', 2, "memory", "at least 16"),
    ("memory with odd bytes", 'name = "web"\n\nmemory = "100MB"\n', 3, "memory", "whole number"),
    ("no vCPU", SMALL + "vcpus = 0\n", 3, "vcpus", "at least 1"),
    ("vCPUs that are a truth value", SMALL + "vcpus = true\n", 3, "vcpus", "a whole number"),
    ("an unknown accelerator", SMALL + 'accel = "xen"\n', 3, "accel", "auto, kvm, tcg"),
    ("a truth value in quotes", SMALL + 'guest_agent = "yes"\n', 3, "guest_agent", "true or false"),
    ("an unknown key", SMALL + "vcpu = 2\n", 3, "vcpu", "no such key"),
    ("an unknown table", SMALL + '\n[network]\ntap = "t0"\n', 4, "network", "no such key"),
    ("a relative base", SMALL + 'base = "here"\n', 3, "base", "absolute"),
    ("a boot without kernel", SMALL + '[boot]\ncmdline = "x"\n', 3, "boot.kernel", "missing"),
    ("an empty path", SMALL + '[boot]\nkernel = ""\n', 4, "boot.kernel", "not a path"),
    ("a boot that is text", SMALL + 'boot = "vmlinuz"\n', 3, "boot", "a table"),
    ("a table for an array", SMALL + '[disks]\npath = "a"\n', 3, "disks", "an array"),
    ("an array of text", SMALL + 'disks = ["a.qcow2"]\n', 3, "disks", "array of tables"),
    (
        "a wrong key in the second disk",
        SMALL + '[[disks]]\npath = "a"\n[[disks]]\npath = "b"\nformat = "vmdk"\n',
        7,
        "disks.1.format",
        "qcow2, raw",
    ),
    (
        "a second disk without path",
        SMALL + '[[disks]]\npath = "a"\n\n[[disks]]\nformat = "raw"\n',
        6,
        "disks.1.path",
        "missing",
    ),
    (
        "a disk's size that is none",
        SMALL + '[[disks]]\npath = "a"\nsize = "big"\n',
        5,
        "disks.0.size",
        "'big'",
    ),
    (
        "an unknown key of a disk, which the VM also has",
        SMALL + '[[disks]]\npath = "a"\nname = "root"\n',
        5,
        "disks.0.name",
        "no such key",
    ),
    (
        "a mistake in an inline table",
        SMALL + 'boot = { kernel = "a", initrd = 3 }\n',
        3,
        "boot.initrd",
        "text in quotes",
    ),
    (
        "a mistake in an inline array",
        SMALL + 'vcpus = 1\ndisks = [{ path = "a", cache = "unsafe" }]\n',
        4,
        "disks.0.cache",
        "none, writeback",
    ),
    ("a mistake in a dotted key", SMALL + "boot.kernel = 5\n", 3, "boot.kernel", "text in quotes"),
    ("a MAC that is none", SMALL + '[[nics]]\nmac = "52:54"\n', 4, "nics.0.mac", "six pairs"),
    ("an unknown network", SMALL + '[[nics]]\nnetwork = "x"\n', 4, "nics.0.network", "bridge"),
    (
        "a device without driver",
        SMALL + '[[devices]]\nid = "x"\n',
        3,
        "devices.0.driver",
        "missing",
    ),
    ("half a firmware", SMALL + '[firmware]\ncode = "a"\n', 3, "firmware.vars", "missing"),
]


@pytest.mark.parametrize(
    ("text", "line", "key", "reason"),
    [case[1:] for case in MALFORMED],
    ids=[case[0].replace(" ", "-") for case in MALFORMED],
)
def test_a_mistake_names_its_line_and_key(text: str, line: int, key: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.what == f"web.toml, line {line}: '{key}' is wrong"
    assert reason in caught.value.why
    assert caught.value.remedy


def test_what_is_no_toml_names_its_line() -> None:
    with pytest.raises(UsageError, match=r"web\.toml is not valid TOML.*line 2"):
        parse('name = "web"\nmemory = \n')


def test_comments_and_text_do_not_mislead_the_line() -> None:
    text = '# vcpus = 1\nname = "web"\nmemory = "1G"\ncpu = "vcpus = 0"\nvcpus = 0\n'
    with pytest.raises(UsageError, match="line 5: 'vcpus'"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        SMALL + '[[disks]]\npath = "a.qcow2"\n',
        SMALL + "[[disks]]\npath = 'a.qcow2'\n",
        SMALL + 'disks = [{ path = "a.qcow2" }]\nram_dir = "ram"\n',
    ],
)
def test_an_anchored_spec_means_the_same_from_anywhere(text: str) -> None:
    here = parse(text)
    there = parse_spec(anchored(here, BASE), "vms/web/spec.toml", Path("/elsewhere"))
    assert (there.disks, there.ram_dir) == (here.disks, here.ram_dir)
    assert anchored(there, Path("/elsewhere")) == there.text


@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(lambda t: t != ".")
)
def test_any_directory_can_be_a_base(name: str) -> None:
    base = Path("/srv") / name
    spec = parse_spec(SMALL + '[boot]\nkernel = "k"\n', "web.toml", base)
    again = parse_spec(anchored(spec, base), "spec.toml", Path("/"))
    assert again.boot == spec.boot == Boot(base / "k", None, "")


def test_a_spec_file_is_read_with_its_own_directory_as_base(tmp_path: Path) -> None:
    file = tmp_path / "web.toml"
    file.write_text(SMALL + '[boot]\nkernel = "vmlinuz"\n')
    spec = read_spec(file)
    assert spec.boot is not None
    assert spec.boot.kernel == tmp_path / "vmlinuz"
    assert parse_spec(spec.text, "spec.toml", Path("/elsewhere")).boot == spec.boot


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00name"])
def test_a_spec_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "web.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=f"cannot read {file}"):
        read_spec(file)


def test_an_image_is_a_file_of_each_hosts_own() -> None:
    text = 'name = "web"\nmemory = "64M"\n[[disks]]\nimage = "root.qcow2"\n[[disks]]\npath = "d"\n'
    own, given = parse_spec(text, "web.toml", BASE).disks
    assert own.on(Path("/state/a")) == Path("/state/a/images/root.qcow2")
    assert given.on(Path("/state/a")) == BASE / "d"


@pytest.mark.parametrize("line", ['image = "../x"', 'image = ".x"', 'image = "a"\npath = "b"'])
def test_an_image_is_a_plain_name_and_no_path(line: str) -> None:
    with pytest.raises(UsageError, match=r"line 4: 'disks\.0\.image' is wrong"):
        parse_spec(f'name = "web"\nmemory = "64M"\n[[disks]]\n{line}\n', "web.toml", BASE)


PASSED = '[[passthrough]]\nid = "gpu"\ndriver = "edu"\nhook = "/x"\nstrategy = "stop-app"\n'


@pytest.mark.parametrize("value", ["2026-01-01", "nan", "[1, inf]", "{a = 07:00:00}"])
@pytest.mark.parametrize(
    "table", ['[[devices]]\ndriver = "edu"\n', PASSED + "[passthrough.options]\n"]
)
def test_what_qemu_is_given_as_json_can_be_written_as_json(table: str, value: str) -> None:
    """Else a VM is written down whose spec nothing can read."""
    with pytest.raises(UsageError) as refused:
        parse_spec(f'name = "a"\nmemory = "64M"\n{table}x = {value}\n', "a.toml", Path("/"))
    assert "x' is wrong" in refused.value.what


@pytest.mark.parametrize("more", ["x = " + "[" * 5000, "vcpus = " + "9" * 5000])
def test_a_spec_that_no_one_writes_is_an_error_of_its_own(more: str) -> None:
    with pytest.raises(UsageError, match="is not valid TOML"):
        parse_spec(f'name = "web"\nmemory = "64M"\n{more}\n', "web.toml", Path("/"))


@pytest.mark.parametrize(
    "words",
    [
        ("-object", "{<vmckpt:ram>"),
        ("{<vmckpt:ram>",),
        ("-device", "{"),
        ("--netdev", '{"type":' + "[" * 5000),
        ("-nic", '{"a":1,"a":2}'),
    ],
)
def test_arguments_of_an_adopted_machine_that_are_no_options_are_refused(
    words: tuple[str, ...],
) -> None:
    """Of a host that was broken into: `vm list` of all hosts ended with "vmckpt has a bug"."""
    listed = ", ".join(f"'{word}'" for word in words)
    text = f"{SMALL}[adopted]\narguments = [{listed}]\nfiles = []\nforwards = []\n"
    with pytest.raises(UsageError, match=r"web\.toml") as refused:
        parse(text)
    assert f"of {'the first' if len(words) == 1 else words[0]}: " in refused.value.why


@pytest.mark.parametrize(
    "argument",
    [
        '{"mem-path":"<vmckpt:ram>"}',
        '{"id":[1],"a":"<vmckpt:ram>"}',
        '{"id":"m","mem-path":"<vmckpt:ram>","offset":-1}',
        '{"id":"m","mem-path":"<vmckpt:ram>","offset":"%s"}' % ("9" * 5000),
        '{"id":"m","mem-path":"<vmckpt:ram>","offset":"x"}',
    ],
)
def test_memory_without_a_name_is_not_where_vmckpt_puts_it(argument: str) -> None:
    assert ram_names(["-object", argument]) == ()


def test_a_kernels_command_line_may_begin_like_an_object() -> None:
    text = f"{SMALL}[adopted]\narguments = ['-append', '{{x']\nfiles = []\nforwards = []\n"
    assert parse(text).adopted
