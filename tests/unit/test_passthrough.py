"""Passthrough devices in a spec: how they are read, plugged and told apart; nothing is run."""

from pathlib import Path

import pytest

from vmckpt.errors import UsageError
from vmckpt.hosts.ssh.address import Address
from vmckpt.preflight.blockers import device_checks
from vmckpt.vm.argv import qemu_argv
from vmckpt.vm.passthrough.cards import Card, cards, parse_functions, unfit
from vmckpt.vm.passthrough.passthrough import Strategy
from vmckpt.vm.passthrough.plug import functions
from vmckpt.vm.paths import VmDir
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import Spec, parse_spec
from vmckpt.vm.spec.spec_text import written

GPU = """
[[passthrough]]
id = "gpu0"
match = "10DE:2330"
hook = "/usr/local/lib/vmckpt/nvidia"
memory = "80G"
limits_s = { checkpoint = 900 }
"""
HEAD = 'name = "web"\nmemory = "1G"\nguest_agent = true\n'
LISTED = """\
0000:00:1f.2 8086:2922 ahci- - - - - -
0000:41:00.0 10de:2330 vfio-pci- - 12- - - -
0000:41:00.1 10de:22a3 vfio-pci- - 12- - - -
0000:42:00.0 10de:2330 nvidia- - 13- - - -
"""


def spec(text: str, head: str = HEAD) -> Spec:
    return parse_spec(head + text, "web.toml", Path("/"))


def test_what_a_spec_says_of_a_device() -> None:
    (device,) = spec(GPU).passthrough
    assert (device.id, device.driver, device.match) == ("gpu0", "vfio-pci", "10de:2330")
    assert device.strategy is Strategy.HOOK_DETACH
    assert device.strategy.detaches
    assert device.memory_bytes == 80 << 30
    assert device.limits_s == {"checkpoint": 900}


def test_without_a_hook_qemu_has_to_move_it() -> None:
    (device,) = spec('[[passthrough]]\nid = "nic0"\nmatch = "15b3:101e"\n').passthrough
    assert device.strategy is Strategy.VFIO_MIGRATION
    assert not device.strategy.detaches


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('id = "GPU 0"\nmatch = "10de:2330"', "'passthrough.0.id' is wrong"),
        ('id = "a"', "'passthrough.0.match' is wrong: vfio-pci needs one"),
        ('id = "a"\ndriver = "edu"\nmatch = "1:2"', "VENDOR:DEVICE"),
        ('id = "a"\ndriver = "edu"\nmatch = "1234:11e8"', "made by QEMU and has none"),
        ('id = "a"\nmatch = "10de:2330"\nhook = "hook"', "a path in the guest"),
        ('id = "a"\nmatch = "10de:2330"\nstrategy = "stop-app"', "'passthrough.0.hook' is wrong"),
        ('id = "a"\nmatch = "10de:2330"\nstrategy = "pray"', "one of hook-detach, stop-app"),
        ('id = "a"\nmatch = "10de:2330"\nlimits_s = { nap = 1 }', "'nap' is not a phase"),
        ('id = "a"\nmatch = "10de:2330"\nlimits_s = { lock = 0 }', "not a whole number of seconds"),
        ('id = "a"\nmatch = "10de:2330"\ncolour = "red"', "there is no such key"),
        ('id = "a"\ndriver = "edu"\n[[passthrough]]\nid = "a"\ndriver = "edu"', "the same id"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        spec(f"[[passthrough]]\n{text}\n")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ('name = "web"\nmemory = "1G"\n', "guest agent"),
        (HEAD + 'machine = "pc"\n', "no ports"),
    ],
)
def test_what_a_device_needs_of_the_machine(head: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        spec(GPU, head)
    assert says in str(error.value)


VF = '[[nics]]\n[[passthrough]]\nid = "vf0"\nstrategy = "failover"\nnic = 0\n'


def test_a_failover_pair() -> None:
    one = spec(VF + 'match = "15b3:101e"\n')
    (device,) = one.passthrough
    assert not device.strategy.detaches
    assert device.netdev is None
    assert functions(device, ["0000:41:00.2"])[0]["failover_pair_id"] == "nic0"
    files = VmDir(Path("/s/vms/web")).qemu("q1")
    argv = qemu_argv(one, Platform("q35", "kvm", "host"), files, "qemu", incoming=False)
    (nic,) = [word for word in argv if "virtio-net-pci" in word]
    assert '"failover":true' in nic


def test_an_emulated_nic_of_a_pair_is_on_the_bridge_too() -> None:
    one = spec(VF + 'driver = "vmxnet3"\n')
    (device,) = one.passthrough
    assert functions(device, [])[0]["netdev"] == "vf0-net"
    files = VmDir(Path("/s/vms/web")).qemu("q1")
    argv = qemu_argv(one, Platform("q35", "tcg", "qemu64"), files, "qemu", incoming=False)
    taps = [word for word in argv if '"type":"tap"' in word]
    assert ['"id":"net0"' in taps[0], '"id":"vf0-net"' in taps[1]] == [True, True]
    assert '"ifname":"vkq11"' in taps[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (VF.replace("nic = 0\n", "") + 'driver = "vmxnet3"', "a failover pair has one"),
        (VF.replace("nic = 0", "nic = 1") + 'driver = "vmxnet3"', "of its own that stands in"),
        ('[[passthrough]]\nid = "a"\ndriver = "edu"\nnic = 0', "no other strategy does"),
    ],
)
def test_what_is_wrong_with_a_pair(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        spec(text)
    assert says in str(error.value)


def test_the_way_to_a_hook_by_ssh() -> None:
    by_ssh = GPU + 'ssh = "ssh://root@192.0.2.30:2222"\n'
    (device,) = spec(by_ssh, HEAD.replace("guest_agent = true\n", "")).passthrough
    assert device.ssh == Address("192.0.2.30", "root", 2222)
    for wrong, says in (
        (GPU + 'ssh = "http://x"\n', "'passthrough.0.ssh' is wrong"),
        ('[[passthrough]]\nid = "a"\nmatch = "10de:2330"\nssh = "a"\n', "there is none"),
    ):
        with pytest.raises(UsageError) as error:
            spec(wrong)
        assert says in str(error.value)


def test_a_copy_has_the_same_devices() -> None:
    one = spec(GPU + 'ssh = "ssh://root@[2001:db8::1]"\n' + VF + 'driver = "vmxnet3"\n')
    assert parse_spec(written(one), "copy", Path("/")).passthrough == one.passthrough


def test_every_device_has_a_port_with_room_for_what_it_holds() -> None:
    one = spec(GPU + '[[passthrough]]\nid = "edu0"\ndriver = "edu"\nhook = "/h"\n')
    files = VmDir(Path("/s/vms/web")).qemu("q1")
    argv = qemu_argv(one, Platform("q35", "kvm", "host"), files, "qemu", incoming=False)
    ports = [word for word in argv if "pcie-root-port" in word]
    assert len(ports) == 2
    assert f'"pref64-reserve":{256 << 30}' in ports[0]
    assert "reserve" not in ports[1]
    assert '"chassis":1' in ports[0]
    assert '"chassis":2' in ports[1]
    # The device itself comes later, and not on every host as the same function.
    assert not any("vfio-pci" in word or '"edu"' in word for word in argv)


def test_all_functions_of_a_card_go_together() -> None:
    (device,) = spec(GPU).passthrough
    first, second = functions(device, ["0000:41:00.0", "0000:41:00.1"])
    assert first == {
        "driver": "vfio-pci",
        "id": "gpu0",
        "bus": "gpu0-port",
        "addr": "0.0",
        "host": "0000:41:00.0",
        "multifunction": True,
    }
    assert (second["id"], second["addr"], second["host"]) == ("gpu0-1", "0.1", "0000:41:00.1")
    assert "multifunction" not in second


def test_cards_of_a_host() -> None:
    ahci, first, second = cards(parse_functions(LISTED))
    assert [ahci.name, first.name, second.name] == ["8086:2922", "10de:2330", "10de:2330"]
    assert first.addresses == ("0000:41:00.0", "0000:41:00.1")
    assert unfit(first, ()) is None
    assert unfit(first, {"0000:41:00.1"}) == "0000:41:00.1 is another VM's"
    assert unfit(second, ()) == "0000:42:00.0 (nvidia) is not bound to vfio-pci"
    assert "(no driver)" in str(unfit(Card((ahci.functions[0]._replace(driver=""),)), ()))


def test_a_virtual_function_is_a_card_by_itself() -> None:
    listed = """\
0000:43:00.0 15b3:101d mlx5_core- - 20- - - -
0000:43:00.1 15b3:101e vfio-pci- - 21- 0000:43:00.0- - -
0000:43:00.2 15b3:101e mlx5_vfio_pci- - 22- 0000:43:00.0- - -
"""
    found = cards(parse_functions(listed))
    assert [card.addresses for card in found] == [
        ("0000:43:00.0",),
        ("0000:43:00.1",),
        ("0000:43:00.2",),
    ]
    assert [unfit(card, {"0000:43:00.2"}) is None for card in found] == [False, True, False]


def test_a_card_whose_iommu_group_others_use_is_not_free() -> None:
    (gpu, nic) = cards(
        parse_functions(
            "0000:41:00.0 10de:2330 vfio-pci- - 12- - - -\n"
            "0000:44:00.0 8086:1533 igb- - 12- - - -\n"
        )
    )
    assert unfit(gpu, (), [gpu]) is None
    reason = unfit(gpu, (), [gpu, nic])
    assert reason == "0000:44:00.0 (igb) is in its IOMMU group and not bound to vfio-pci"


def test_what_blocks_because_of_vfio_names_the_ways() -> None:
    blocker = "0000:41:00.0: VFIO migration is not supported in kernel"
    (check,) = device_checks([blocker], {})
    assert check.verdict == "refuse"
    assert "hook-detach" in check.remedy
