"""What a migration asks for, and every reason against it, found before anything is changed."""

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.codec import builtins
from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Completed, Fingerprint
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.kernel import BOOT_ID
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.options.migration import AtTarget, Method, MigrationOptions, OnTimeout
from vmckpt.preflight.destination_host import USERFAULTFD, USERFAULTFD_DEVICE, machine
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding
from vmckpt.preflight.migration.checks import Preflight, locking, preflight
from vmckpt.preflight.migration.dirty_log import loss
from vmckpt.preflight.migration.encryption import Encryption, Scheme
from vmckpt.preflight.migration.method import copy_checks, encryption_checks, resolve_method
from vmckpt.qemu.abilities import SWITCHOVER_SPEED, ZERO_PAGES, Abilities, Agreement, WantedSettings
from vmckpt.qemu.replies import QemuVersion
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import Adopted, parse_spec

NEW = Abilities(
    version=QemuVersion(10, 0, 2),
    machines={"q35": "pc-q35-10.0", "pc-q35-10.0": "pc-q35-10.0", "pc-q35-7.2": "pc-q35-7.2"},
    cpu_models=frozenset({"qemu64", "max"}),
    capabilities=frozenset(
        {"events", "return-path", "postcopy-ram", "multifd", "auto-converge", "postcopy-blocktime"}
    ),
    compressions=frozenset({"none", "zstd"}),
    parameters=frozenset({SWITCHOVER_SPEED}),
    commands=frozenset({"migrate"}),
)
OLD = NEW._replace(
    version=QemuVersion(7, 2, 22),
    machines={"q35": "pc-q35-7.2", "pc-q35-7.2": "pc-q35-7.2"},
    compressions=frozenset({"none"}),
    parameters=frozenset(),
)
AGREEMENT = Agreement({}, {}, {})
# What a plain pre-copy constraints.
HELD = WantedSettings(hold_switchover=True)


def host(root: Path, name: str, abilities: Abilities, *, bridge: str | None = "br0") -> LocalHost:
    """A host whose QEMU has been asked already: its answers stand in the cache."""
    state = root / name
    binary = state / "qemu"
    cache = state / "cache"
    cache.mkdir(parents=True)
    binary.touch(mode=0o755)
    stat = binary.stat()
    key = hashlib.sha256(f"{binary}:{stat.st_mtime_ns}:{stat.st_size}".encode()).hexdigest()[:16]
    (cache / f"qemu-{key}.json").write_text(json.dumps(builtins(abilities)))
    return LocalHost(name, state, "127.0.0.1", qemu=str(binary), bridge=bridge)


def stopped_vm(
    where: LocalHost, *, machine: str = "pc-q35-7.2", cpu: str = "qemu64", more: str = ""
) -> Vm:
    text = f'name = "web"\nmemory = "16M"\nram_dir = "{where.state_dir}"\n{more}'
    directory = vm_dir(where.state_dir, "web")
    files = directory.qemu("0123abcd")
    qemu = Qemu(files, ProcessId(0, 0), Platform(machine, "tcg", cpu))
    return Vm(parse_spec(text, "web.toml", where.state_dir), where, directory, qemu)


def checked(
    vm: Vm, target: LocalHost, options: MigrationOptions | None = None
) -> dict[str, Finding]:
    found = asyncio.run(preflight(vm, target, options or MigrationOptions(method=Method.PRECOPY)))
    return {check.code: check for check in found.checks}


def refusals(vm: Vm, target: LocalHost, options: MigrationOptions | None = None) -> set[str]:
    # The VM of these tests is stopped: a process is no unit test's business.
    found = checked(vm, target, options)
    assert found["running"].verdict == "refuse"
    return {code for code, check in found.items() if check.verdict == "refuse"} - {"running"}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (MigrationOptions(), HELD),
        (
            MigrationOptions(method=Method.PRECOPY, max_downtime_ms=50),
            HELD._replace(max_downtime_ms=50),
        ),
        (MigrationOptions(auto_converge=True), HELD._replace(auto_converge=True)),
        (MigrationOptions(method=Method.HYBRID), HELD._replace(postcopy=True)),
        (MigrationOptions(method=Method.STOP), WantedSettings()),
        (
            MigrationOptions(method=Method.POSTCOPY),
            WantedSettings(postcopy=True, max_downtime_ms=1),
        ),
        (
            MigrationOptions(timeout_s=9, on_timeout=OnTimeout.POSTCOPY),
            HELD._replace(postcopy=True),
        ),
        (MigrationOptions(on_timeout=OnTimeout.POSTCOPY), HELD),
        (MigrationOptions(timeout_s=9), HELD),
        (MigrationOptions(channels=4), HELD._replace(channels=4)),
        (MigrationOptions(compression="zstd"), HELD._replace(channels=2, compression="zstd")),
        (
            MigrationOptions(compression="zstd", channels=8),
            HELD._replace(channels=8, compression="zstd"),
        ),
        (
            MigrationOptions(compression="xbzrle", xbzrle_cache_bytes=4096),
            HELD._replace(compression="xbzrle", xbzrle_cache_bytes=4096),
        ),
        (
            MigrationOptions(compression="zlib", compression_level=3),
            HELD._replace(channels=2, compression="zlib", compression_level=3),
        ),
        (MigrationOptions(channels=2, zero_copy=True), HELD._replace(channels=2, zero_copy=True)),
        (
            MigrationOptions(method=Method.HYBRID, postcopy_bandwidth_bytes_per_s=7),
            HELD._replace(postcopy=True, postcopy_bandwidth_bytes_per_s=7),
        ),
        (
            MigrationOptions(throttle_initial_percent=30, throttle_increment_percent=5),
            HELD._replace(throttle_initial_percent=30, throttle_increment_percent=5),
        ),
        (
            MigrationOptions(bandwidth_bytes_per_s=1 << 30),
            HELD._replace(max_bandwidth_bytes_per_s=1 << 30),
        ),
    ],
)
def test_options_ask_for_what_they_say(options: MigrationOptions, settings: WantedSettings) -> None:
    assert options.settings() == settings


@given(
    st.builds(
        MigrationOptions,
        method=st.sampled_from(Method),
        timeout_s=st.none() | st.floats(0.1, 1e4),
        on_timeout=st.sampled_from(OnTimeout),
        compression=st.sampled_from([None, "zstd"]),
        channels=st.none() | st.integers(1, 64),
    )
)
def test_postcopy_is_asked_for_exactly_when_it_may_come_to_it(options: MigrationOptions) -> None:
    settings = options.settings()
    assert settings.postcopy is options.may_postcopy
    if options.method in (Method.POSTCOPY, Method.HYBRID):
        assert options.may_postcopy
    # A compression without channels would be dropped without a word.
    assert settings.compression is None or settings.channels is not None


def test_auto_is_precopy_that_slows_a_guest_that_dirties_too_fast() -> None:
    resolved = resolve_method(MigrationOptions(max_downtime_ms=70), loses_pages=False)
    assert resolved == MigrationOptions(
        method=Method.PRECOPY, auto_converge=True, max_downtime_ms=70
    )


def test_auto_takes_two_channels_where_both_qemus_split_memory_well(tmp_path: Path) -> None:
    splits = NEW._replace(parameters=NEW.parameters | {ZERO_PAGES})
    a, b = host(tmp_path, "a", splits), host(tmp_path, "b", splits)
    plain = host(tmp_path, "plain", NEW)
    for source, target, channels in ((a, b, 2), (a, plain, None), (plain, a, None)):
        found = asyncio.run(preflight(stopped_vm(source), target, MigrationOptions()))
        assert found.options.channels == channels
    named = asyncio.run(preflight(stopped_vm(a), b, MigrationOptions(method=Method.PRECOPY)))
    assert named.options.channels is None


@pytest.mark.parametrize(
    ("asked", "channels"),
    [
        (MigrationOptions(), 2),
        (MigrationOptions(auto_converge=True, max_downtime_ms=30), 2),
        (MigrationOptions(channels=5), 5),
        (MigrationOptions(compression="zstd"), None),
        (MigrationOptions(bandwidth_bytes_per_s=1 << 20), None),
        (MigrationOptions(timeout_s=9, on_timeout=OnTimeout.POSTCOPY), None),
        (MigrationOptions(timeout_s=9), 2),
    ],
)
def test_auto_takes_no_channels_beside_what_they_would_spoil(
    asked: MigrationOptions, channels: int | None
) -> None:
    assert resolve_method(asked, loses_pages=False, splits_well=True).channels == channels
    assert resolve_method(asked, loses_pages=True, splits_well=True).channels == asked.channels


def test_auto_avoids_what_loses_pages(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", OLD), host(tmp_path, "b", NEW)
    found = asyncio.run(preflight(stopped_vm(source), target, MigrationOptions()))
    assert found.options.method is Method.STOP


def test_a_guest_that_is_stopped_is_slowed_by_no_steps() -> None:
    asked = MigrationOptions(throttle_initial_percent=30, throttle_increment_percent=5)
    assert resolve_method(asked, loses_pages=True) == MigrationOptions(method=Method.STOP)
    kept = dataclasses.replace(asked, method=Method.PRECOPY, auto_converge=True)
    assert resolve_method(asked, loses_pages=False) == kept


@pytest.mark.parametrize(("asked", "copies", "said"), [(1, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_writes_that_nothing_waits_for_are_told(asked: int, copies: int, said: int) -> None:
    options = MigrationOptions(synchronous_writes=bool(asked))
    found = list(copy_checks(options, copies_disks=bool(copies)))
    assert [check.verdict for check in found] == ["warn"] * said


@pytest.mark.parametrize("method", [m for m in Method if m is not Method.AUTO])
@pytest.mark.parametrize("loses_pages", [True, False])
def test_a_method_that_is_named_is_kept(method: Method, loses_pages: bool) -> None:
    options = MigrationOptions(method=method)
    assert resolve_method(options, loses_pages=loses_pages) is options


def test_a_pair_that_fits_has_nothing_against_it(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", OLD)
    vm = stopped_vm(source)
    assert refusals(vm, target) == set()
    found = asyncio.run(preflight(vm, target, MigrationOptions(method=Method.PRECOPY)))
    assert found.agreement is not None
    assert checked(vm, target)["qemu-pair"].reason == "QEMU 10.0.2 -> 7.2.22"


def test_a_vm_stays_where_it_is(tmp_path: Path) -> None:
    source = host(tmp_path, "a", NEW)
    assert set(checked(stopped_vm(source), source)) == {"same-host"}
    # Another name for the same state is the same host.
    assert set(checked(stopped_vm(source), dataclasses.replace(source, name="b"))) == {"same-host"}


def test_a_machine_type_that_the_target_lacks(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", OLD)
    vm = stopped_vm(source, machine="pc-q35-10.0")
    assert refusals(vm, target) == {"machine-type"}
    check = checked(vm, target)["machine-type"]
    assert check.reason == "QEMU 7.2.22 on b has no machine type pc-q35-10.0"
    assert "pc-q35-7.2" in check.remedy


def test_a_cpu_model_that_the_target_lacks(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", NEW)
    assert refusals(stopped_vm(source, cpu="EPYC,-sse4a"), target) == {"cpu-model"}
    assert refusals(stopped_vm(source, cpu="qemu64,+aes"), target) == set()


def test_a_name_that_the_target_has(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", NEW)
    other = stopped_vm(target)
    asyncio.run(target.make_dir(other.directory.path))
    asyncio.run(target.write_text(other.directory.spec, other.spec.text))
    asyncio.run(target.write_text(other.directory.current, other.qemu.to_json()))
    assert refusals(stopped_vm(source), target) == {"name-free"}


def test_files_that_the_target_cannot_read(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", NEW)
    here = tmp_path / "here.qcow2"
    here.touch()
    more = f'[[disks]]\npath = "{here}"\n[boot]\nkernel = "/gone/vmlinuz"\n'
    vm = stopped_vm(source, more=more)
    assert refusals(vm, target) == {"files"}
    reason = checked(vm, target)["files"].reason
    assert "/gone/vmlinuz" in reason
    assert "here.qcow2" not in reason


def test_a_bridge_that_the_target_has_not(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", NEW, bridge=None)
    assert refusals(stopped_vm(source, more="[[nics]]\n"), target) == {"bridge"}


@dataclasses.dataclass(frozen=True, slots=True)
class Other(LocalHost):
    """Another machine: its bridge, ports, clock, files and rights are what the test says."""

    shows: Completed | None = None
    fast_by_s: float = 0.0
    firmware: Fingerprint | None = None
    closed: str = "/none"
    userfaults: str | None = "1"
    user: int = 0
    device: bool = False
    boot_id: str | None = None

    async def run(self, argv: Sequence[str], timeout_s: float = 30.0) -> Completed:
        assert self.shows is not None
        return self.shows

    async def user_id(self) -> int:
        return self.user

    async def read_text(self, path: Path) -> str | None:
        if path == USERFAULTFD:
            return self.userfaults
        if path == BOOT_ID and self.boot_id:
            return self.boot_id
        return await super(Other, self).read_text(path)

    async def usable(self, path: Path) -> bool:
        return self.device if path == USERFAULTFD_DEVICE else await super(Other, self).usable(path)

    async def unix_time_s(self) -> float:
        return await super(Other, self).unix_time_s() + self.fast_by_s

    async def fingerprint(self, path: Path) -> Fingerprint | None:
        return self.firmware

    async def may_write_below(self, directory: Path) -> bool:
        return str(directory) != self.closed


def other(root: Path, **facts: Any) -> Other:
    like = host(root, "b", NEW)
    fields = {field.name: getattr(like, field.name) for field in dataclasses.fields(like)}
    return Other(**(fields | facts))


@pytest.mark.parametrize(
    ("shows", "expected"),
    [
        (Completed(0, "5: br0: <BROADCAST,UP> mtu 1500", ""), set()),
        (Completed(1, "", 'Device "br0" does not exist.'), {"bridge"}),
        (Completed(0, "", ""), {"bridge"}),
    ],
)
def test_a_bridge_has_to_be_one(tmp_path: Path, shows: Completed, expected: set[str]) -> None:
    vm = stopped_vm(host(tmp_path, "a", NEW), more="[[nics]]\n")
    assert refusals(vm, other(tmp_path, shows=shows)) == expected


@pytest.mark.parametrize(
    ("fast_by_s", "verdict"), [(0, "ok"), (-0.5, "ok"), (-90, "warn"), (90, "warn")]
)
def test_clocks_that_differ_are_named(tmp_path: Path, fast_by_s: float, verdict: str) -> None:
    vm = stopped_vm(host(tmp_path, "a", NEW))
    assert checked(vm, other(tmp_path, fast_by_s=fast_by_s))["clock"].verdict == verdict


def test_another_machine_is_not_reached_at_a_loopback_address(tmp_path: Path) -> None:
    """Else the source's QEMU would connect to its own machine, and be refused."""
    vm = stopped_vm(host(tmp_path, "a", NEW))
    elsewhere = other(tmp_path, boot_id="another boot\n")
    assert refusals(vm, elsewhere) == {"address"}
    reached = dataclasses.replace(elsewhere, migration_address="192.0.2.7")
    assert refusals(vm, reached) == set()
    assert refusals(vm, dataclasses.replace(elsewhere, boot_id=None)) == set()


def test_a_range_of_ports_has_to_have_a_free_one(tmp_path: Path) -> None:
    vm = stopped_vm(host(tmp_path, "a", NEW))
    line = "   0: 0100007F:C350 00000000:0000 0A 0 0"
    ports = {"enter": ("env",), "migration_ports": (50000, 50000)}
    taken = other(tmp_path, shows=Completed(0, line, ""), **ports)
    assert refusals(vm, taken) == {"ports"}
    assert refusals(vm, dataclasses.replace(taken, migration_ports=(50000, 50001))) == set()


@pytest.mark.parametrize("closed", ["state", "ram"])
def test_a_target_that_this_user_may_not_write_to(tmp_path: Path, closed: str) -> None:
    vm = stopped_vm(host(tmp_path, "a", NEW))
    target = other(tmp_path)
    location = target.state_dir if closed == "state" else vm.spec.ram_dir
    assert refusals(vm, dataclasses.replace(target, closed=str(location))) == {"permissions"}


def with_firmware(tmp_path: Path) -> tuple[Vm, Fingerprint]:
    """A VM whose firmware and its variables are one file, and what its host says of that."""
    file = tmp_path / "code.fd"
    file.write_bytes(b"firmware")
    source = host(tmp_path, "a", NEW)
    vm = stopped_vm(source, more=f'[firmware]\ncode = "{file}"\nvars = "{file}"\n')
    said = asyncio.run(source.fingerprint(file))
    assert said is not None
    return vm, said


def test_firmware_has_to_fit(tmp_path: Path) -> None:
    vm, same = with_firmware(tmp_path)
    assert same.size_bytes == 8
    target = other(tmp_path, firmware=same)
    assert checked(vm, target)["firmware"].verdict == "ok"
    rebuilt = dataclasses.replace(target, firmware=same._replace(sha256="0"))
    assert checked(vm, rebuilt)["firmware"].verdict == "warn"
    smaller = dataclasses.replace(target, firmware=same._replace(size_bytes=4))
    assert refusals(vm, smaller) == {"firmware"}


def test_only_a_guest_that_runs_brings_what_its_firmware_wrote(tmp_path: Path) -> None:
    vm, same = with_firmware(tmp_path)
    target = other(tmp_path, firmware=same)
    assert refusals(vm, target, MigrationOptions(offline=True)) == set()
    stale = dataclasses.replace(target, firmware=same._replace(sha256="0"))
    assert refusals(vm, stale, MigrationOptions(offline=True)) == {"firmware-variables"}
    assert refusals(vm, stale) == set()


@pytest.mark.parametrize(
    ("allowed", "user", "expected"),
    [
        ("1", 1000, set()),
        ("0", 0, set()),
        ("0", 1000, {"userfaultfd"}),
        (None, 1000, {"userfaultfd"}),
    ],
)
def test_post_copy_needs_userfaultfd(
    tmp_path: Path, allowed: str | None, user: int, expected: set[str]
) -> None:
    vm = stopped_vm(host(tmp_path, "a", NEW))
    target = other(tmp_path, userfaults=allowed, user=user)
    assert refusals(vm, target, MigrationOptions(method=Method.POSTCOPY)) == expected
    assert refusals(vm, target, MigrationOptions(method=Method.PRECOPY)) == set()


@pytest.mark.parametrize(("is_new", "device"), [(True, True), (True, False), (False, True)])
def test_a_group_may_use_userfaultfd_by_its_device(
    tmp_path: Path, *, is_new: bool, device: bool
) -> None:
    """QEMU opens it since 8.0."""
    vm = stopped_vm(host(tmp_path, "a", NEW))
    target = other(tmp_path, userfaults="0", user=1000, device=device)
    if not is_new:
        like = host(tmp_path, "c", OLD)
        target = dataclasses.replace(target, qemu=like.qemu, state_dir=like.state_dir)
    found = checked(vm, target, MigrationOptions(method=Method.POSTCOPY))["userfaultfd"]
    assert (found.verdict == "ok") == (is_new and device)
    assert ("sysctl" in found.remedy) == (not is_new)


@pytest.mark.parametrize(
    ("here", "there", "method", "verdict"),
    [
        (NEW, NEW, Method.PRECOPY, "ok"),
        (NEW, OLD, Method.PRECOPY, "warn"),
        (OLD, NEW, Method.STOP, "ok"),
    ],
)
def test_the_way_back_is_looked_at(
    tmp_path: Path, here: Abilities, there: Abilities, method: Method, verdict: str
) -> None:
    source, target = host(tmp_path, "a", here), host(tmp_path, "b", there)
    found = checked(stopped_vm(source), target, MigrationOptions(method=method))
    assert found["way-back"].verdict == verdict


def test_user_mode_nat_is_warned_about(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", NEW, bridge=None)
    vm = stopped_vm(source, more='[[nics]]\nnetwork = "user"\n')
    assert refusals(vm, target) == set()
    assert checked(vm, target)["user-network"].verdict == "warn"


def test_memory_that_the_target_has_no_room_for(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", NEW)
    vm = stopped_vm(source)
    huge = vm._replace(spec=vm.spec._replace(memory_bytes=1 << 60))
    assert refusals(huge, target) == {"memory"}
    nowhere = vm._replace(spec=vm.spec._replace(ram_dir=Path("/gone")))
    assert refusals(nowhere, target) == {"memory"}


@pytest.mark.parametrize(("there", "refused"), [(NEW, False), (OLD, True)])
@pytest.mark.parametrize("count", [1, 2])
def test_blocks_of_memory_in_one_file_need_a_qemu_that_has_them(
    tmp_path: Path, there: Abilities, count: int, *, refused: bool
) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", there)
    ram = '{{"qom-type":"memory-backend-file","id":"m{0}","mem-path":"<vmckpt:ram>","offset":{0}}}'
    words = [word for number in range(count) for word in ("-object", ram.format(number))]
    vm = stopped_vm(source)
    vm = vm._replace(spec=vm.spec._replace(adopted=Adopted(tuple(words), (), ())))
    is_found = "memory-blocks" in {one.code for one in machine(vm, target, there)}
    assert is_found is (refused and count == 2)


def test_an_option_that_the_pair_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", OLD)
    options = MigrationOptions(method=Method.PRECOPY, compression="zstd")
    assert refusals(stopped_vm(source), target, options) == {"qemu-option"}
    assert "--compress" in checked(stopped_vm(source), target, options)["qemu-option"].reason


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        (MigrationOptions(method=Method.PRECOPY), "warn"),
        (MigrationOptions(method=Method.HYBRID), "refuse"),
        (MigrationOptions(method=Method.POSTCOPY), "refuse"),
        (MigrationOptions(method=Method.STOP), None),
    ],
)
def test_a_source_that_loses_pages_is_named(
    tmp_path: Path, options: MigrationOptions, verdict: str | None
) -> None:
    source, target = host(tmp_path, "a", OLD), host(tmp_path, "b", NEW)
    check = checked(stopped_vm(source), target, options).get("tcg-dirty-log")
    assert (check.verdict if check else None) == verdict
    assert check is None or "7.2.22" in check.reason
    # As a target it is as good as any.
    assert "tcg-dirty-log" not in checked(stopped_vm(target), source, options)


def test_a_host_without_qemu_is_refused(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", NEW)
    with pytest.raises(RefusedError, match="b has no QEMU"):
        checked(stopped_vm(source), dataclasses.replace(target, qemu="/gone/qemu"))


def test_every_refusal_is_named_at_once_with_its_code() -> None:
    checks = (
        Finding("running", OK, "it runs"),
        Finding("memory", REFUSE, "no room", "free some"),
        Finding("tcg-dirty-log", WARN, "beware"),
        Finding("bridge", REFUSE, "no bridge", "name it"),
    )
    with pytest.raises(RefusedError) as caught:
        Preflight(checks, MigrationOptions(), AGREEMENT).require("web", "b")
    assert caught.value.what == "'web' cannot migrate to b"
    assert caught.value.why == "[memory] no room; [bridge] no bridge"
    assert caught.value.remedy == "free some; name it"


def test_warnings_do_not_refuse() -> None:
    checks = (Finding("tcg-dirty-log", WARN, "beware"),)
    assert Preflight(checks, MigrationOptions(), AGREEMENT).require("web", "b") is AGREEMENT
    with pytest.raises(RefusedError):
        Preflight(checks, MigrationOptions()).require("web", "b")


BACK_END = '"-object", "memory-backend-ram,id=m{0},size=8M"'
NUMA = (
    "[adopted]\nfiles = []\nforwards = []\narguments = ["
    f"{BACK_END.format(0)}, {BACK_END.format(1)}]\n"
)


@pytest.mark.parametrize("method", [Method.PRECOPY, Method.HYBRID, Method.POSTCOPY])
def test_writes_to_a_second_memory_back_end_are_not_seen_under_tcg(
    tmp_path: Path, method: Method
) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", NEW)
    check = checked(stopped_vm(source, more=NUMA), target, MigrationOptions(method=method))[
        "tcg-dirty-log"
    ]
    assert check.verdict == "refuse"
    assert "memory back end" in check.reason
    one = NUMA.replace(f", {BACK_END.format(1)}", "")
    assert "tcg-dirty-log" not in checked(stopped_vm(source, more=one), target)


def test_kvm_sees_the_writes_to_every_back_end(tmp_path: Path) -> None:
    vm = stopped_vm(host(tmp_path, "a", NEW), more=NUMA)
    assert loss(vm, QemuVersion(10, 0, 2))
    platform = dataclasses.replace(vm.qemu.platform, accel="kvm")
    kvm = vm._replace(qemu=vm.qemu._replace(platform=platform))
    assert loss(kvm, QemuVersion(10, 0, 2)) is None


@pytest.mark.parametrize(
    ("limit", "rights", "warned"),
    [
        ("8388608", "0000000000000000", True),
        ("8388608", "0000000000004000", False),
        ("unlimited", "0000000000000000", False),
        ("536870912", "0000000000000000", False),
        ("9" * 5000, "0000000000000000", False),
    ],
)
def test_a_qemu_that_may_keep_little_in_place_is_warned_of(
    limit: str, rights: str, *, warned: bool
) -> None:
    limits = f"Limit                     Soft Limit\nMax locked memory   {limit}  {limit}  bytes\n"
    found = list(locking(limits, f"Name:\tqemu\nCapEff:\t{rights}\n", 512 << 20))
    assert [check.code for check in found] == (["zerocopy"] if warned else [])


def test_what_domains_alone_have_is_refused_by_name(tmp_path: Path) -> None:
    source, target = host(tmp_path, "a", NEW), host(tmp_path, "b", NEW)
    options = MigrationOptions(Method.PRECOPY, at_target=AtTarget("web2", graphics_uri="vnc://b"))
    assert refusals(stopped_vm(source), target, options) == {"qemu-option"}
    check = checked(stopped_vm(source), target, options)["qemu-option"]
    assert check.remedy == "leave out --dname, --graphicsuri"


@pytest.mark.parametrize(
    ("options", "scheme", "option"),
    [
        (MigrationOptions(zero_copy=True), Scheme.UNENCRYPTED, None),
        (MigrationOptions(zero_copy=True), Scheme.ONE_TIME_KEY, "--zerocopy"),
        (MigrationOptions(zero_copy=True), Scheme.CERTIFICATES, "--zerocopy"),
        (MigrationOptions(tls_name="b"), Scheme.CERTIFICATES, None),
        (MigrationOptions(tls_name="b"), Scheme.ONE_TIME_KEY, "--tls-destination"),
        (MigrationOptions(tls_name="b"), Scheme.UNENCRYPTED, "--tls-destination"),
    ],
)
def test_what_does_not_go_with_the_encryption_that_was_chosen(
    options: MigrationOptions, scheme: Scheme, option: str | None
) -> None:
    found = [
        check.reason.partition(":")[0]
        for check in encryption_checks(options, Encryption(scheme, ""))
    ]
    assert found == ([] if option is None else [option])
