"""The inventory: which hosts and VMs there are, read from files that people also write."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unreadable import nothing_is_listed
from vmckpt.errors import BusyError, NotFoundError, OutcomeUnknownError, StorageError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory import inventory
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.entries import parse_entry
from vmckpt.hosts.inventory.inventory import all_hosts, check_name, find_host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.migrate.outcome.journal import MigrationJournal, find_journal
from vmckpt.vm.inventory import find_vm, homes, read_vm
from vmckpt.vm.lifecycle import read_again
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu

A = {
    "kind": "local",
    "state_dir": "/run/lab/a",
    "migration_address": "10.77.1.1",
    "enter": ["nsenter", "--net=/run/lab/a.net"],
    "qemu": "/opt/qemu/bin/qemu-system-x86_64",
    "bridge": "br0",
    "heartbeats": "/run/lab/observer.sock",
}
JOURNAL = MigrationJournal(
    "r1", "web", "a", "b", "0123abcd", "fedcba98", "/dev/shm", True, "transfer"
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    (tmp_path / "hosts").mkdir()
    return tmp_path


def add_host(state: Path, name: str, **changed: Any) -> Path:
    path = state / "hosts" / f"{name}.json"
    path.write_text(json.dumps(A | {"state_dir": str(state / name)} | changed))
    return path


def add_vm(host: Host, name: str) -> Qemu:
    directory = vm_dir(host.state_dir, name)
    asyncio.run(host.make_dir(directory.path))
    qemu = Qemu(directory.qemu("0123abcd"), ProcessId(1, 0), Platform("q35", "tcg", "qemu64"))
    asyncio.run(host.write_text(directory.spec, f'name = "{name}"\nmemory = "64M"\n'))
    asyncio.run(host.write_text(directory.current, qemu.to_json()))
    return qemu


def test_this_machine_is_always_a_host(state: Path) -> None:
    assert all_hosts() == [LocalHost("local", state, "127.0.0.1")]


def test_hosts_are_read_whole_local_first_then_by_name(state: Path) -> None:
    add_host(state, "lab-b", enter=[], bridge=None, heartbeats=None)
    add_host(state, "lab-a", state_dir="/run/lab/a")
    assert [host.name for host in all_hosts()] == ["local", "lab-a", "lab-b"]
    assert find_host("lab-a") == LocalHost(
        name="lab-a",
        state_dir=Path("/run/lab/a"),
        migration_address="10.77.1.1",
        enter=("nsenter", "--net=/run/lab/a.net"),
        qemu="/opt/qemu/bin/qemu-system-x86_64",
        bridge="br0",
        heartbeats=Path("/run/lab/observer.sock"),
    )
    assert find_host("lab-b").bridge is None


def test_a_file_may_say_how_local_is_reached(state: Path) -> None:
    add_host(state, "local", migration_address="192.0.2.7")
    assert [(host.name, host.migration_address) for host in all_hosts()] == [("local", "192.0.2.7")]


def test_two_keys_are_enough_for_a_host(state: Path) -> None:
    (state / "hosts/b.json").write_text('{"state_dir": "/b", "migration_address": "10.0.0.2"}')
    assert find_host("b") == LocalHost("b", Path("/b"), "10.0.0.2")
    assert find_host("b").second_address is None


def test_a_host_may_have_a_second_address(state: Path) -> None:
    add_host(state, "a", second_address="192.0.2.7")
    assert find_host("a").second_address == "192.0.2.7"


def test_an_unknown_host_is_not_found_and_the_known_are_named(state: Path) -> None:
    add_host(state, "lab-a")
    with pytest.raises(NotFoundError, match="there is no host 'lab-x'") as caught:
        find_host("lab-x")
    assert "local, lab-a" in caught.value.why


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is not valid JSON"),
        ("[]", "it must be an object"),
        ("{}", "state_dir"),
        ('{"state_dir": "/a"}', "migration_address"),
        ('{"state_dir": 7, "migration_address": "x"}', "got `int` - at `$.state_dir`"),
        ('{"state_dir": "a", "migration_address": "x"}', "absolute"),
        ('{"state_dir": "/a", "migration_address": 7}', "got `int` - at `$.migration_address`"),
        (
            '{"state_dir": "/a", "migration_address": "x", "enter": "nsenter -t 1"}',
            "Expected `array`, got `str`",
        ),
        (
            '{"state_dir": "/a", "migration_address": "x", "enter": [1]}',
            "got `int` - at `$.enter[0]`",
        ),
        (
            '{"state_dir": "/a", "migration_address": "x", "qemu": null}',
            "Expected `str`, got `null`",
        ),
        ('{"state_dir": "/a", "migration_address": "x", "heartbeats": "h"}', "absolute"),
    ],
)
def test_a_malformed_inventory_file_is_named(state: Path, text: str, reason: str) -> None:
    path = state / "hosts" / "odd.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"{path} is malformed") as caught:
        all_hosts()
    assert reason in caught.value.why


def test_a_host_has_a_name_as_a_vm_has(state: Path) -> None:
    add_host(state, "Lab A")
    with pytest.raises(UsageError, match="'Lab A' is not a name for a host"):
        all_hosts()


@pytest.mark.parametrize("name", ["a", "0", "web-1.prod_x", "Win11", "x" * 40])
def test_good_names_are_taken(name: str) -> None:
    assert check_name(name, "VM") == name


@pytest.mark.parametrize(
    "name", ["", "-a", ".a", "..", "_a", "a/b", "a b", "a\n", "ä", "x" * 41, "a\0"]
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a name for a VM"):
        check_name(name, "VM")


def test_the_state_directory_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VMCKPT_STATE_DIR", "here")
    assert state_dir() == tmp_path / "here"


def test_a_vm_is_found_where_it_is_at_home(state: Path) -> None:
    add_host(state, "lab-a")
    host = find_host("lab-a")
    qemu = add_vm(host, "web")
    vm = asyncio.run(find_vm("web"))
    assert (vm.name, vm.host, vm.qemu) == ("web", host, qemu)
    assert vm.spec.memory_bytes == 64 << 20


def test_a_vm_that_is_not_there_yet_is_not_at_home(state: Path) -> None:
    # A target has the spec before it has the guest.
    add_host(state, "lab-a")
    host = find_host("lab-a")
    add_vm(host, "web")
    asyncio.run(host.remove(vm_dir(host.state_dir, "web").current))
    assert asyncio.run(read_vm(host, "web")) is None
    with pytest.raises(NotFoundError, match="there is no VM 'web'"):
        asyncio.run(find_vm("web"))


def test_a_vm_at_home_twice_is_said_to_be_and_not_guessed(state: Path) -> None:
    for name in ("lab-a", "lab-b"):
        add_host(state, name)
        add_vm(find_host(name), "web")
    assert [vm.host.name for vm in asyncio.run(homes("web"))] == ["lab-a", "lab-b"]
    with pytest.raises(OutcomeUnknownError, match="lab-a and lab-b"):
        asyncio.run(find_vm("web"))


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"pid": 1}', b"[]", b"\xff\xfe"])
def test_a_damaged_vm_file_is_named(state: Path, content: bytes) -> None:
    add_host(state, "lab-a")
    host = find_host("lab-a")
    add_vm(host, "web")
    current = vm_dir(host.state_dir, "web").current
    current.write_bytes(content)
    with pytest.raises(StorageError, match=f"{current} is damaged"):
        asyncio.run(read_vm(host, "web"))


def test_a_journal_is_read_back_from_whichever_host_has_it(state: Path) -> None:
    for name in ("a", "b"):
        add_host(state, name)
    a, b = find_host("a"), find_host("b")
    assert asyncio.run(find_journal("web", (a, b))) is None
    asyncio.run(JOURNAL.write((a, b)))
    assert (
        asyncio.run(MigrationJournal.read(a, "web"))
        == asyncio.run(MigrationJournal.read(b, "web"))
        == JOURNAL
    )
    asyncio.run(JOURNAL.remove((a,)))
    assert asyncio.run(find_journal("web", (a, b))) == JOURNAL
    asyncio.run(JOURNAL.remove((a, b)))
    assert asyncio.run(find_journal("web", (a, b))) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "run": "x"}'])
def test_a_damaged_journal_is_named(state: Path, text: str) -> None:
    add_host(state, "a")
    host = find_host("a")
    path = vm_dir(host.state_dir, "web").journal
    asyncio.run(host.make_dir(path.parent))
    path.write_text(text)
    with pytest.raises(StorageError, match=f"{path} on a is damaged"):
        asyncio.run(MigrationJournal.read(host, "web"))


def test_of_two_journals_the_one_that_got_further_counts(state: Path) -> None:
    """Written on one host, and then the disk of the other was full."""
    a, b = (LocalHost(name, state / name, "127.0.0.1") for name in ("a", "b"))
    early, late = replace(JOURNAL, step="transfer"), replace(JOURNAL, step="verify")
    for first, second in ((early, late), (late, early)):
        asyncio.run(first.write((a,)))
        asyncio.run(second.write((b,)))
        assert asyncio.run(find_journal("web", (a, b))) == late
    assert late.past_commit
    assert not early.past_commit


def test_a_journal_with_a_step_that_nobody_knows_is_damaged(state: Path) -> None:
    host = LocalHost("a", state / "a", "127.0.0.1")
    asyncio.run(JOURNAL.write((host,)))
    path = vm_dir(host.state_dir, "web").journal
    path.write_text(path.read_text().replace('"transfer"', '"teleport"'))
    with pytest.raises(StorageError, match="damaged: 'teleport' is not a step"):
        asyncio.run(MigrationJournal.read(host, "web"))


def test_a_vm_is_read_again_by_the_holder_of_its_lock(state: Path) -> None:
    host = LocalHost("lab-a", state / "lab-a", "127.0.0.1")
    add_vm(host, "web")
    vm = asyncio.run(read_vm(host, "web"))
    assert vm is not None
    assert asyncio.run(read_again(vm)) == vm
    asyncio.run(replace(JOURNAL, vm="web").write((host,)))
    with pytest.raises(BusyError, match="interrupted"):
        asyncio.run(read_again(vm))
    asyncio.run(JOURNAL.remove((host,)))
    asyncio.run(host.remove(vm.directory.current))
    with pytest.raises(BusyError, match="no longer on lab-a"):
        asyncio.run(read_again(vm))


def test_what_comes_and_goes_beside_the_entries_keeps_no_host_back(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is removed at this moment; an editor's lock, a link to nowhere (Emacs)."""
    (state / "hosts/.#b.json").symlink_to("user@machine.1")
    removed = add_host(state, "a")
    add_host(state, "b")

    def removing(name: str, data: dict[str, Any]) -> Any:
        removed.unlink(missing_ok=True)
        if name == "a":
            raise FileNotFoundError
        return parse_entry(name, data)

    monkeypatch.setattr(inventory, "parse_entry", removing)
    assert [host.name for host in all_hosts()] == ["local", "b"]


def test_a_link_to_an_entry_that_is_not_there_is_no_host_that_was_removed(state: Path) -> None:
    (state / "hosts/b.json").symlink_to("not-mounted/b.json")
    with pytest.raises(FileNotFoundError):
        all_hosts()


def test_an_inventory_that_cannot_be_read_is_not_one_of_this_machine_alone(state: Path) -> None:
    """A VM on another host would be run a second time: no host that has it was asked."""
    add_host(state, "a")
    with nothing_is_listed(), pytest.raises(StorageError, match="hosts"):
        all_hosts()
    assert [host.name for host in all_hosts()] == ["local", "a"]
