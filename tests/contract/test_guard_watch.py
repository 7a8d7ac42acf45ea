"""How long a guard watches, and what its command's output takes on its host."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.test_images import a_vm
from tests.unit.test_checkpoint_catalogue import Elsewhere
from tests.unit.test_guard_records import record
from vmckpt.cli.nouns.guard import _tools, run_
from vmckpt.errors import HostDownError, OperationFailedError, RefusedError
from vmckpt.fleet.guard import command, guard, proof
from vmckpt.fleet.guard.guard import GuardTools, _Guarding
from vmckpt.fleet.guard.proof import copy_name
from vmckpt.fleet.guard.record import (
    GuardPhase,
    GuardRecord,
    GuardRequest,
    GuardWorker,
    OnFailure,
    ended,
    load,
    load_all,
    save,
)
from vmckpt.fleet.guard.rollback import GuardOpenError
from vmckpt.fleet.schedule.run import clock
from vmckpt.hosts.inventory.inventory import change_host
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.paths import vm_dir

pytestmark = pytest.mark.contract
DAY_S = 86_400.0


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_clock_that_is_set_meanwhile_changes_no_watch(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Set forward, it ended at its first look; set back, it lasted a day more."""
    looks = list[float]()

    async def find(name: str, tell: object) -> Any:
        return name

    async def ask(why: str) -> None:
        return None

    async def health_problems(vm: Any, checks: Sequence[object]) -> list[str]:
        looks.append(time.monotonic())
        return []

    monkeypatch.setattr(guard, "health_problems", health_problems)
    began = record("r", GuardPhase.WATCHING)
    asked = replace(began.request, watch_s=0.3, every_s=0.05)
    until_s = time.time() + 0.3
    began = replace(began, request=asked, watch_until_unix_s=until_s, watch_began=clock())
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    work = _Guarding(began, GuardTools(lambda _: None, lambda _: None, ask, 1, find), ())
    began_s = time.monotonic()
    assert asyncio.run(asyncio.wait_for(work._watch(), 30)) == ""
    assert time.monotonic() - began_s >= 0.25
    assert len(looks) > 1


@pytest.mark.parametrize("jump_s", [2 * DAY_S, -2 * DAY_S])
def test_a_clock_that_is_set_removes_no_way_back_before_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Set forward by a day, it was removed when the next guard was begun or guards were listed."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    kept = asyncio.run(guard.commit(save(record("r", GuardPhase.OPEN)), print))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    asyncio.run(guard.expire())
    [known] = load_all().require_sound()
    assert known == kept
    now = clock()
    late = now._replace(boot_s=now.boot_s + kept.request.keep_s)
    assert kept.has_expired(late)


def test_what_was_shown_of_a_commands_output_takes_no_room_on_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SHOWN_BYTES", 1 << 20)
    host = LocalHost("a", tmp_path / "a", "127.0.0.1")
    asked = record("r", GuardPhase.COMMAND)
    words = ("head", "-c", str(24 << 20), "/dev/zero")
    asked = replace(asked, request=replace(asked.request, command=words))
    shown = list[int]()

    async def begun(worker: GuardWorker) -> None:
        return None

    async def play() -> None:
        assert await command._on_host(host, asked, begun, lambda t: shown.append(len(t))) == ""

    asyncio.run(play())
    log = host.state_dir / command.WORK_DIRECTORY / "r/output"
    assert sum(shown) == log.stat().st_size == 24 << 20
    assert log.stat().st_blocks * 512 <= 2 << 20


def test_what_came_of_it_can_be_kept_though_the_commands_host_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed open for good, its checkpoint pinned, and the VM could have no other guard."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    told = list[str]()
    opened = save(record("r", GuardPhase.OPEN), worker=GuardWorker("gone", "/nowhere"))
    kept = asyncio.run(guard.commit(opened, told.append))
    assert kept.phase is GuardPhase.KEPT
    assert load_all().require_sound() == [kept]
    assert "files of the command remain on gone" in told[0]
    guard._require_none_open("web")


def test_ctrl_c_ends_the_question_whether_to_roll_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no effect until the question was answered."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    began = save(record("r", GuardPhase.COMMAND))
    assert began.request.on_failure is OnFailure.ASK

    async def find(name: str, tell: object) -> Any:
        raise AssertionError

    async def fails() -> str:
        return "the command's exit status is 1"

    async def play() -> None:
        is_asked = asyncio.Event()

        async def ask(why: str) -> bool | None:
            is_asked.set()
            await asyncio.sleep(3600)
            return True

        work = _Guarding(began, GuardTools(print, print, ask, 1, find), ())
        deciding = asyncio.ensure_future(work._decide(fails()))
        await is_asked.wait()
        deciding.cancel()
        with pytest.raises(GuardOpenError):
            await asyncio.wait_for(asyncio.shield(deciding), 10)

    asyncio.run(play())
    assert load("r").phase is GuardPhase.OPEN


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_one_that_was_cut_off_before_its_command_is_neither_kept_nor_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The copy that proved its checkpoint ran on, or a VM was put back for nothing."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    cut_off = save(record("r", GuardPhase.PREPARING), checkpoint="0123")

    async def never(*_: object) -> Any:
        raise AssertionError

    tools = GuardTools(print, print, never, 1, never)
    ends = guard.commit(cut_off, print) if end == "commit" else guard.undo(cut_off, tools)
    with pytest.raises(RefusedError, match="had not begun its command") as refused:
        asyncio.run(ends)
    assert "vmckpt guard resume web" in refused.value.remedy
    assert load_all().require_sound() == [cut_off]


def test_how_it_has_ended_meanwhile_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolled back while `commit` was on its way to the lock, it was written down as kept."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    seen = save(record("r", GuardPhase.WATCHING))
    over = save(seen, **ended(seen, GuardPhase.ROLLED_BACK, clock()))
    with pytest.raises(RefusedError, match="was rolled back"):
        asyncio.run(guard.commit(seen, print))
    assert load_all().require_sound() == [over]


def test_a_command_whose_output_no_one_reads_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal had gone: its command was ended, and a healthy VM was rolled back."""
    host = LocalHost("a", tmp_path / "a", "127.0.0.1")
    asked = record("r", GuardPhase.COMMAND)
    done = tmp_path / "done"
    words = ("sh", "-c", f"echo begun; sleep 0.5; echo more; touch {done}")
    asked = replace(asked, request=replace(asked.request, command=words))

    async def begun(worker: GuardWorker) -> None:
        return None

    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        say = _tools(as_json=False).say
        assert asyncio.run(command._on_host(host, asked, begun, say)) == ""
    assert done.exists()


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_copy_that_cannot_be_removed_yet_is_removed_by_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off: bool
) -> None:
    """The guard was forgotten, and the copy that proved its checkpoint ran on for good."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    removed, told = list[str](), list[str]()
    is_down = True

    async def remove_copy(of: GuardRecord, _: object) -> None:
        if is_down:
            raise HostDownError("no route", why="-", remedy="-")
        removed.append(copy_name(of))

    async def fails(*_: object) -> Any:
        raise OperationFailedError("the copy does not run", why="-", remedy="-")

    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(guard, "remove_copy", remove_copy)
    monkeypatch.setattr(_Guarding, "_remove_points", nothing)
    monkeypatch.setattr(guard, "_checks", lambda _: ())
    tools = GuardTools(told.append, print, fails, 1, fails)
    begun = save(replace(record("r", GuardPhase.PREPARING), host="local"))
    vm: Any = SimpleNamespace(name="web", host=None, checkpoint=fails)
    if cut_off:
        with pytest.raises(HostDownError):
            asyncio.run(guard.resume(begun, tools))
    else:
        with pytest.raises(OperationFailedError, match="the copy does not run"):
            asyncio.run(_Guarding(begun, tools, ()).from_the_start(vm))
    assert told[-1] == "to remove it: vmckpt guard resume web"
    [still] = load_all().require_sound()
    is_down = False
    assert asyncio.run(guard.resume(still, tools)) is None
    assert (removed, load_all().require_sound()) == (["proof-r"], [])


def test_a_copy_that_a_drain_has_moved_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard was forgotten, and the copy ran on where it was moved."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    other = LocalHost("b", tmp_path / "b", "127.0.0.1")
    change_host(other)
    image = other.state_dir / "images/proof-r.raw"
    image.parent.mkdir(parents=True)
    image.touch()
    a_vm(other, "proof-r", 'image = "proof-r.raw"\nformat = "raw"')

    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(_Guarding, "_remove_points", nothing)
    monkeypatch.setattr(guard, "_checks", lambda _: ())
    begun = save(replace(record("r", GuardPhase.PREPARING), host="local"))
    tools = GuardTools(print, print, nothing, 1, nothing)  # type: ignore[arg-type]
    assert asyncio.run(guard.resume(begun, tools)) is None
    assert not vm_dir(other.state_dir, "proof-r").path.exists()
    assert not image.exists()


def test_nothing_is_kept_of_a_domain_that_was_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each guard of a domain left a directory with what its copy had been restored from."""
    host, image = LocalHost("a", tmp_path, "::1"), tmp_path / "proof-r-0.qcow2"
    kept = tmp_path / "libvirt"
    for uuid in ("of-the-copy", "of-the-original"):
        (kept / uuid).mkdir(parents=True)
        (kept / uuid / "checkpoint").touch()
    image.touch()

    async def inspect() -> Any:
        return SimpleNamespace(uuid="of-the-copy")

    async def done(**_: object) -> None:
        return None

    async def copies(*_: object) -> list[Any]:
        work = {"stop": done, "remove": done, "inspect": inspect}
        return [SimpleNamespace(host=host, own_images=lambda: [image], **work)]

    monkeypatch.setattr(proof, "_copies", copies)
    begun = replace(record("r", GuardPhase.PREPARING), host="a", is_domain=True)
    asyncio.run(proof.remove_copy(begun, host))
    assert not image.exists()
    assert [path.name for path in kept.iterdir()] == ["of-the-original"]


def test_a_guards_store_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named relative to the one where it was begun, `guard rollback` in another found nothing."""
    asked = list[GuardRequest]()

    async def captured(_: str, request: GuardRequest, __: object) -> GuardRecord:
        asked.append(request)
        return record("r", GuardPhase.KEPT)

    monkeypatch.setattr(guard, "guard", captured)
    monkeypatch.chdir(tmp_path)
    run_("web", ["true"], store="points")
    assert asked[0].store == str(tmp_path / "points")
    # And a directory is one of the VM's host, also where the checkpoint is looked for.
    far: Any = SimpleNamespace(host=Elsewhere("far", Path("/far"), "192.0.2.1"))
    at_far = guard._located(replace(asked[0], store="/srv/points"), far)
    assert at_far.store == "far:/srv/points"
    assert guard._located(replace(asked[0], store=None), far).store is None
