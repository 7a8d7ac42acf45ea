"""A checkpoint that this site did not take gets a guest of its own, and nothing of the host's."""

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_checkpoint_tree import MACHINE, facts
from vmckpt.checkpoint.facts import (
    CheckpointFacts,
    DiskFacts,
    machine_from_json,
    machine_to_json,
    usable_facts,
)
from vmckpt.checkpoint.origin import digest, is_own, marked, run_key
from vmckpt.checkpoint.restore.planned import (
    CheckpointStanding,
    plan_copy,
    plan_itself,
    standing_of,
)
from vmckpt.checkpoint.restore.requests import CheckpointSource
from vmckpt.errors import RefusedError, StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.store.files.manifest import AreaFacts, Manifest
from vmckpt.vm.argv import qemu_argv
from vmckpt.vm.identity import new_identity
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import Spec, parse_spec

ID = "0123456789abcdef" * 2
HOST = LocalHost("here", Path("/state"), "127.0.0.1")
GUEST = """
base = "/specs"
name = "web"
memory = "64M"
[[disks]]
path = "/etc/cron.d/web"
format = "raw"
[[nics]]
"""
MIB = 1 << 20
HUGE = 1 << 60
CRONTAB = DiskFacts("/etc/cron.d/web", "raw", MIB, False, "disk-0")


def taken(spec: str = GUEST, **changes: Any) -> CheckpointFacts:
    made = replace(facts("one"), spec=spec, disks=(CRONTAB,), machine=machine_to_json(MACHINE))
    return replace(made, **changes)


def manifest(given: dict[str, Any], vm: str = "web", ram_bytes: int = 64 * MIB) -> Manifest:
    areas = tuple(
        AreaFacts(name, size, chunk, 0, 0, 0)
        for name, size, chunk in (("ram", ram_bytes, 4096), ("disk-0", MIB, 65536))
    )
    return Manifest(ID, vm, None, 1.0, 0, areas, (), (), given)


def standing(own: Spec | None = None, *, trusted: bool = False) -> CheckpointStanding:
    return CheckpointStanding(ID, is_foreign=True, is_trusted=trusted, own=own)


def spec(text: str) -> Spec:
    return parse_spec(text, "spec", Path("/specs"))


@pytest.mark.parametrize("trusted", [False, True])
def test_its_disks_are_new_images_however_it_names_them(trusted: bool) -> None:
    planned = plan_itself(taken(), HOST, standing(trusted=trusted), plugged=False)
    (made,) = planned.disks
    assert made.path == Path("/state/images/web-0-01234567.raw")
    assert planned.made_new == {made.path}
    assert spec(planned.spec.text).disks[0].on(HOST.state_dir) == made.path


def test_it_is_another_vm_than_it_says_until_it_is_trusted() -> None:
    theirs = new_identity()
    made = replace(manifest(taken().to_json()), vm_id=theirs)
    assert CheckpointSource("store", ID, known="").identity_for(made, None) != theirs
    assert CheckpointSource("store", ID, known=digest(made)).identity_for(made, None) == theirs
    assert CheckpointSource("store", ID, known=digest(made)).identity_for(made, "copy") != theirs


def test_another_vms_image_is_not_taken_by_its_name() -> None:
    text = GUEST.replace('path = "/etc/cron.d/web"', 'image = "db.qcow2"')
    planned = plan_itself(taken(text), HOST, standing(), plugged=False)
    assert planned.disks[0].path.name == "web-0-01234567.raw"


def test_in_place_the_vms_own_disks_are_its_own() -> None:
    planned = plan_itself(taken(), HOST, standing(own=spec(GUEST)))
    assert planned.disks[0].path == Path("/etc/cron.d/web")
    assert planned.made_new == frozenset()


ASKING = {
    "boot": '[boot]\nkernel = "/root/.ssh/id_rsa"\n',
    "initrd": '[boot]\nkernel = "/dev/shm"\ninitrd = "/etc/shadow"\n',
    "firmware": '[firmware]\ncode = "/dev/shm"\nvars = "/etc/shadow"\n',
    "read-only disk": '[[disks]]\nread_only = true\npath = "/etc/passwd"\n',
    "ROM": '[[devices]]\ndriver = "virtio-rng-pci"\nromfile = "/etc/shadow"\n',
    "device": '[[devices]]\ndriver = "vhost-vsock-pci"\nguest-cid = 3\n',
    "loader": '[[devices]]\ndriver = "loader"\nfile = "/etc/shadow"\naddr = "0x1000"\n',
    "passthrough": '[[passthrough]]\nid = "gpu"\nmatch = "10de:2330"\n',
    "made device": '[[passthrough]]\nid = "a"\ndriver = "loader"\noptions.file = "/etc/shadow"\n',
    "adopted": '[adopted]\narguments = ["-chardev", "file,id=a,path=/etc/cron.d/x"]\n'
    "files = []\nforwards = []\n",
}


@pytest.mark.parametrize("what", ASKING)
@pytest.mark.parametrize("copy", [False, True])
def test_what_the_host_would_open_is_named_and_refused(what: str, copy: bool) -> None:
    text = GUEST + ASKING[what]
    if what == "adopted":
        text = text.replace('format = "raw"', 'format = "raw"\nnode = "a"')

    facts_ = taken(text)
    if what == "read-only disk":
        passwd = DiskFacts("/etc/passwd", "qcow2", MIB, True, None)
        facts_ = replace(facts_, disks=(CRONTAB, passwd))

    def plan(how: CheckpointStanding) -> object:
        if copy:
            return plan_copy(facts_, HOST, "web-2", how, keep_macs=False)
        return plan_itself(facts_, HOST, how, plugged=False)

    with pytest.raises(RefusedError, match="was not taken by this site") as refused:
        plan(standing())
    named = ASKING[what].split('"')[-2]
    assert "--trust" in refused.value.remedy
    assert named in refused.value.why or what in {"device", "passthrough"}
    # What the operator wrote himself into the spec of that VM here is his own word.
    if not (copy and what == "adopted"):
        plan(standing(own=spec(text)))
        plan(standing(trusted=True))


READ_ONLY = '[[disks]]\nread_only = true\npath = "/srv/base.qcow2"\n'


def test_what_the_host_only_reads_for_a_vm_is_not_written_for_a_foreign_one() -> None:
    """The file of the VM's own kernel or base image as the variables that firmware writes."""
    own = spec(GUEST + '[boot]\nkernel = "/srv/vmlinuz"\n' + READ_ONLY)
    for path in ("/srv/vmlinuz", "/srv/base.qcow2"):
        text = GUEST + f'[firmware]\ncode = "/srv/vmlinuz"\nvars = "{path}"\n'
        with pytest.raises(RefusedError, match="was not taken by this site") as refused:
            plan_itself(taken(text), HOST, standing(own=own), plugged=False)
        assert refused.value.why == f"file {path}"


def test_a_read_only_disk_of_the_vm_is_not_replaced_by_a_foreign_one() -> None:
    """In place too: other VMs may stand on that image."""
    text = GUEST.replace('path = "/etc/cron.d/web"', 'path = "/srv/base.raw"')
    own = spec(text.replace('format = "raw"', 'format = "raw"\nread_only = true'))
    planned = plan_itself(taken(text), HOST, standing(own=own))
    assert planned.disks[0].path == Path("/state/images/web-0-01234567.raw")
    assert planned.made_new


def test_a_qemu_without_its_filter_is_asked_for() -> None:
    text = GUEST.replace("memory", "sandbox = false\nmemory")
    with pytest.raises(RefusedError) as refused:
        plan_itself(taken(text), HOST, standing(own=spec(GUEST)), plugged=False)
    assert "sandbox = false" in refused.value.why
    plan_itself(taken(text), HOST, standing(own=spec(text)), plugged=False)
    plan_itself(taken(text), HOST, standing(trusted=True), plugged=False)


def test_one_isolated_nic_is_no_word_for_the_others() -> None:
    """The host is asked for no network, and gives none."""
    nics = '[[nics]]\nisolated = true\n[[nics]]\nnetwork = "user"\n'
    text = GUEST.replace("[[nics]]\n", nics)
    facts_ = taken(text, macs=("52:54:00:00:00:01", "52:54:00:00:00:02"))
    planned = plan_itself(facts_, HOST, standing())
    platform = Platform("pc-q35-10.0", "tcg", "qemu64")
    argv = qemu_argv(planned.spec, platform, planned.vm.qemu.files, "qemu", incoming=True)
    assert not [word for word in argv if '"type":"user"' in word and "-off" not in word]


def test_the_hosts_network_is_asked_for() -> None:
    with pytest.raises(RefusedError, match="the host's network") as refused:
        plan_itself(taken(), HOST, standing())
    assert "bridge" in refused.value.why
    plan_itself(taken(), HOST, standing(), plugged=False)


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    words = taken().to_json()
    change(words)
    return words


BAD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "machine": lambda f: f["platform"].update(machine="q35,dumpdtb=/root/x"),
    "accel": lambda f: f["platform"].update(accel="kvm,device=/dev/sda"),
    "cpu": lambda f: f["platform"].update(cpu="-device"),
    "platform": lambda f: f["platform"].update(more="x"),
    "platform type": lambda f: f.update(platform=[]),
    "memory": lambda f: f.update(memory_bytes=1 << 50),
    "memory type": lambda f: f.update(memory_bytes="64M"),
    "vcpus": lambda f: f.update(spec=GUEST.replace("memory", "vcpus = 100000\nmemory")),
    "another name": lambda f: f.update(spec=GUEST.replace('"web"', '"db"')),
    "path as name": lambda f: f.update(spec=GUEST.replace('"web"', '"../../etc"')),
    "no spec": lambda f: f.update(spec=None),
    "no TOML": lambda f: f.update(spec="["),
    "fewer disks": lambda f: f.update(disks=[]),
    "raw as qcow2": lambda f: f.update(spec=GUEST.replace('"raw"', '"qcow2"')),
    "disk size": lambda f: f.update(disks=[asdict(replace(CRONTAB, size_bytes=1 << 60))]),
    "negative size": lambda f: f.update(disks=[asdict(replace(CRONTAB, size_bytes=-1))]),
    "another area": lambda f: f.update(disks=[asdict(replace(CRONTAB, area="ram"))]),
    "no such area": lambda f: f.update(disks=[asdict(replace(CRONTAB, area="../x"))]),
    "no content": lambda f: f.update(disks=[asdict(replace(CRONTAB, area=None, size_bytes=HUGE))]),
    "kind": lambda f: f.update(kind="another"),
    "nothing saved": lambda f: f.update(kind="file"),
    "disk type": lambda f: f.update(disks=[7]),
    "MAC": lambda f: f.update(macs=["52:54:00:00:00:01\nx"]),
    "MAC type": lambda f: f.update(macs=[1]),
    "MACs": lambda f: f.update(macs=[]),
}


@pytest.mark.parametrize("how", BAD)
def test_facts_that_contradict_themselves_are_refused(how: str) -> None:
    usable_facts(manifest(taken().to_json()))
    with pytest.raises(RefusedError, match="does not know this kind of checkpoint"):
        usable_facts(manifest(changed(BAD[how])))


def test_memory_that_its_area_does_not_fit_is_refused() -> None:
    with pytest.raises(RefusedError):
        usable_facts(manifest(taken().to_json(), ram_bytes=1 << 40))


@pytest.mark.parametrize(("saved_bytes", "fits"), [(190 * MIB, True), (1 << 40, False)])
def test_what_was_saved_as_a_whole_is_no_larger_than_its_vm_can_be(
    saved_bytes: int, *, fits: bool
) -> None:
    """A few bytes of maps name one chunk any number of times: it filled the host's memory."""
    one = manifest(taken(kind="file", saved_as="mapped-ram").to_json())
    areas = (AreaFacts("saved", saved_bytes, 4096, 0, 0, 0), *one.areas[1:])
    if fits:
        assert usable_facts(replace(one, areas=areas)).kind == "file"
        return
    with pytest.raises(RefusedError, match="does not know this kind of checkpoint"):
        usable_facts(replace(one, areas=areas))


@pytest.mark.parametrize(
    "changes",
    [
        {"features": None},
        {"features": [["x"]]},
        {"features": [[["cpuid-register", "EAX"], ["features", 1]]]},
        {"devices": []},
        {"devices": {"a": [1]}},
        {"more": 1},
    ],
)
def test_a_machine_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    """ "vmckpt has a bug", when its QEMU had been started."""
    words = machine_to_json(MACHINE)
    assert machine_from_json(words) == MACHINE
    with pytest.raises(RefusedError, match="does not know this kind of checkpoint"):
        machine_from_json({**words, **changes})
    with pytest.raises(RefusedError):
        machine_from_json({})


def test_only_this_sites_mark_makes_a_checkpoint_its_own(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    words = marked(taken().to_json(), run_key(ours, "web"), ID, "web")
    assert is_own(ours, manifest(words))
    assert (ours / "site.key").stat().st_mode & 0o777 == 0o600
    assert not is_own(theirs, manifest(words))  # a site without a key of its own
    foreign = marked(taken().to_json(), run_key(theirs, "web"), ID, "web")
    assert not is_own(ours, manifest(foreign))
    assert not is_own(ours, manifest(taken().to_json()))
    renamed = {**words, "name": "another"}
    assert is_own(ours, manifest(renamed))
    assert not is_own(ours, manifest({**words, "spec": words["spec"] + "# more"}))
    assert not is_own(ours, manifest(words, vm="db"))
    assert not is_own(ours, replace(manifest(words), id="f" * 32))
    bad: list[Any] = [None, [], {}, {"nonce": 1, "mark": 2}, {"nonce": "x", "mark": "ü"}]
    bad += [{"nonce": "x", "mark": "\ud800"}, {"nonce": "\ud800", "mark": "x"}]
    for origin in bad:
        assert not is_own(ours, manifest({**words, "origin": origin}))


def test_a_host_that_took_one_vms_checkpoint_cannot_mark_anothers(tmp_path: Path) -> None:
    """It is given a key for that; one restored elsewhere would have opened what it names there."""
    key = run_key(tmp_path, "db")
    assert is_own(tmp_path, manifest(marked(taken().to_json(), key, ID, "db"), vm="db"))
    assert not is_own(tmp_path, manifest(marked(taken().to_json(), key, ID, "web")))


def test_a_mark_of_an_older_vmckpt_is_this_sites_still(tmp_path: Path) -> None:
    (tmp_path / "site.key").write_text("00" * 32)
    nonce = "ab" * 16
    secret = hmac.new(bytes(32), nonce.encode(), hashlib.sha256).hexdigest()
    words = marked(taken().to_json(), f"{nonce}:{secret}", ID, "web")
    assert is_own(tmp_path, manifest(words))


def test_a_damaged_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "site.key").write_text("no hex")
    with pytest.raises(StorageError, match=r"cannot read .*site\.key"):
        is_own(tmp_path, manifest(taken().to_json()))


def test_what_is_restored_is_what_was_looked_at(tmp_path: Path) -> None:
    host = LocalHost("here", tmp_path, "127.0.0.1")
    one, other = manifest(taken().to_json()), manifest(taken(trigger="x").to_json())
    found = asyncio.run(standing_of(one, host, known=digest(one), is_foreign=False))
    assert (found.is_foreign, found.is_trusted) == (False, True)
    with pytest.raises(RefusedError, match="has changed"):
        asyncio.run(standing_of(other, host, known=digest(one), is_foreign=False))
    unknown = asyncio.run(standing_of(one, host, known="", is_foreign=False))
    assert (unknown.is_foreign, unknown.is_trusted) == (True, False)


JUNK = st.none() | st.integers() | st.text() | st.lists(st.integers())


@given(st.dictionaries(st.sampled_from(sorted(taken().to_json())), JUNK))
def test_whatever_the_facts_are_they_are_read_or_refused(junk: dict[str, Any]) -> None:
    try:
        usable_facts(manifest({**taken().to_json(), **junk}))
    except RefusedError:
        return
