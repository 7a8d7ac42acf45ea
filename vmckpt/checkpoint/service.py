"""What runs on a VM's host for a checkpoint, a restore or forks: told by a file, telling by one.

STATE/checkpointing/RUN has request.json, status.json (replaced whenever something is new), who is
at it (process.json) and service.log. The process lives until all is done: after a restore, until
all of the memory is there.
"""

import asyncio
import gc
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from vmckpt.checkpoint import fork, recover, restore, restore_disks, take
from vmckpt.checkpoint.facts import FILE
from vmckpt.checkpoint.group_member import FAILED as GAVE_UP
from vmckpt.checkpoint.group_member import Member, joined
from vmckpt.checkpoint.secret import forget, forget_old_secrets, taken_from
from vmckpt.checkpoint.whole import take_whole
from vmckpt.codec import builtins, convert
from vmckpt.errors import NotFoundError, VmckptError
from vmckpt.hosts.deadman import armed
from vmckpt.hosts.host import Entry, Host, entry_fields
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.process import PROCESS, identify
from vmckpt.hosts.remote.values import pack_error
from vmckpt.hosts.scheduling import session_has_waited
from vmckpt.state.documents import save_to
from vmckpt.store.open import Access
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.lifecycle import restore_is_cut_off

DIRECTORY = "checkpointing"
CREATE, RESTORE, FORK, RECOVER = "create", "restore", "fork", "recover"
# What a run told can be read for so long after its end.
KEPT_S = 86_400.0
# One of a group comes last on a busy host for so long.
MOST_LAST_S = 10.0
WORKING, RUNNING, SETTLED, DONE, FAILED = "working", "running", "settled", "done", "failed"


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one run, below a host's state directory."""

    path: Path

    @classmethod
    def of(cls, host: Host, run: str) -> Self:
        """Those of a run on a host."""
        return cls(host.state_dir / DIRECTORY / run)

    @property
    def request(self) -> Path:
        """What is to be done."""
        return self.path / "request.json"

    @property
    def status(self) -> Path:
        """How it is."""
        return self.path / "status.json"

    @property
    def process(self) -> Path:
        """Who does it; written before it looks whether it is still wanted."""
        return self.path / "process.json"

    @property
    def revoked(self) -> Path:
        """There once nobody wants it any more; looked for before anything is begun."""
        return self.path / "revoked"

    @property
    def log(self) -> Path:
        """What the process says besides."""
        return self.path / "service.log"

    @property
    def ear(self) -> Path:
        """Where the head of its group comes to."""
        return self.path / "group.sock"

    @property
    def recovery_log(self) -> Path:
        """What was done after its death."""
        return self.path / "recovery.log"


class Asked(NamedTuple):
    """What is to be done, to which VM, with the store in which place.

    `held_s`: together with a group; so long may a VM's output be held for it (0: it is not).
    """

    verb: str
    vm: str
    store: str
    held_s: float | None = None


def request_for(
    host: Host,
    asked: Asked,
    wish: Mapping[str, Any],
    key_path: Path | None,
    access: Access | None = None,
) -> str:
    """The text of a request. `wish` is the verb's own.

    `key_path` is where the secret of an encrypted store is left (`secret.py`). Of `access` all but
    the secret is in it.
    """
    where = builtins(Entry(**entry_fields(host)))
    key = str(key_path) if key_path else None
    more = dict[str, Any]()
    if access is not None:
        more = {"access": {"store_id": access.store_id, "may_be_made": access.may_be_made}}
    return json.dumps({"host": where, **asked._asdict(), "wish": dict(wish), "key": key, **more})


async def serve(directory: Path, own_command: list[str]) -> None:
    """Do what the request says; errors are told, not raised."""
    gc.freeze()  # or a collection in a pause would look at all that was imported
    files = Files(directory)
    asked = _read(files)
    if me := identify(os.getpid()):
        await save_to(_host(asked), files.process, PROCESS, me)
    if files.revoked.exists():
        _forget_key(asked)
        return
    asyncio.get_running_loop().call_later(MOST_LAST_S, session_has_waited)
    service = _Service(files, asked)
    forget_old(directory.parent, time.time())
    forget_old_secrets(time.time())
    with ExitStack() as stack:
        recovery = [*own_command, "checkpointing", str(directory), "--recover"]
        stack.enter_context(armed(recovery, files.recovery_log))
        await service.work()
        with suppress(VmckptError):  # then it is for the next command on the VM
            await _end_what_is_cut_off(asked)


def forget_old(directory: Path, now_unix_s: float) -> None:
    """Remove the files of runs in which nothing was written for a day."""
    for path in directory.glob("*/"):
        with suppress(FileNotFoundError):  # another removes it too
            last_unix_s = max(one.stat().st_mtime for one in (path, *path.iterdir()))
            if now_unix_s - last_unix_s > KEPT_S:
                shutil.rmtree(path)


async def recover_from(directory: Path) -> None:
    """After the death of a service: pages that are still to come do come, its secret goes.

    What it was making of a VM is finished, or nothing of it stays (`making.py`).
    """
    asked = _read(Files(directory))
    _forget_key(asked)
    host = _host(asked)
    vm = await read_vm(host, asked["vm"])
    if vm is not None and asked["held_s"]:
        await recover.let_output_go(vm)
    if asked["verb"] == FORK:
        fork.remove_parts(host, directory.name)
    await _end_what_is_cut_off(asked)


async def _end_what_is_cut_off(asked: Mapping[str, Any]) -> None:
    host, names = _host(asked), [asked["vm"]]
    if asked["verb"] == FORK:
        names = fork.Wish(**asked["wish"]).names
    for name in names:
        vm = await read_vm(host, name)
        if vm is None:
            await recover.undo(host, name)
        elif await restore_is_cut_off(vm):
            await recover.recover(vm)


class _Service:
    """One request."""

    def __init__(self, files: Files, asked: Mapping[str, Any]) -> None:
        self._files, self._asked = files, asked
        self._host = _host(asked)
        self._told: dict[str, Any] = {}
        self._steps: list[str] = []

    async def work(self) -> None:
        """To its end."""
        try:
            async with self._joined() as member:
                await self._do(member)
        except (VmckptError, OSError) as exc:
            self._say(FAILED, error=pack_error(exc, self._host.name))
        except asyncio.CancelledError:
            self._say(FAILED, error=["CancelledByUserError", "cancelled", "asked to stop", "-"])
            raise

    @asynccontextmanager
    async def _joined(self) -> AsyncIterator[Member | None]:
        """Its part in a group, if it is in one; the head hears what it fails of."""
        held_s = self._asked["held_s"]
        if held_s is None:
            yield None
            return
        async with joined(self._files.ear, held_s) as member:
            try:
                yield member
            except (VmckptError, OSError) as exc:
                member.say(GAVE_UP, error=pack_error(exc, self._host.name))
                raise

    async def _do(self, member: Member | None) -> None:
        verb, place, wish = self._asked["verb"], self._asked["store"], self._asked["wish"]
        secret = taken_from(self._asked["key"])
        if verb == CREATE:
            vm = await read_vm(self._host, self._asked["vm"])
            if vm is None:
                raise NotFoundError(
                    f"'{self._asked['vm']}' is not on {self._host.name} any more",
                    why="it was moved or removed meanwhile",
                    remedy="see `vmckpt vm list`",
                )
            asked, access = take.Wish(**wish), self._access(secret)
            if asked.kind == FILE:
                taken = await take_whole(vm, place, asked, self._step, access)
            else:
                taken = await take.take(vm, place, asked, self._step, access, member=member)
            self._say(DONE, result=taken.to_json())
            if member is not None:
                member.say("committed", result=taken.to_json())
        elif verb == RESTORE:
            apart = ("checkpoint", "known", "is_foreign")
            given = restore.Wish(**{k: v for k, v in wish.items() if k not in apart})
            point = restore.Source(
                place, wish["checkpoint"], secret, wish["known"], wish["is_foreign"]
            )
            if given.disks_only:
                done = await restore_disks.restore_disks(self._host, point, given)
                self._say(DONE, result=asdict(done))
                return
            running = self._is_running(member)
            await restore.restore(self._host, point, given, running, member=member)
            self._say(DONE, **self._told)
        else:
            run = self._files.path.name
            forks = await fork.fork(self._host, place, fork.Wish(**wish), secret, run=run)
            self._say(DONE, result={"forks": [one.to_json() for one in forks]})

    def _access(self, secret: bytes | None) -> Access:
        """What the operator's process found the store to be. An older one says less of it."""
        found = self._asked.get("access") or {"store_id": None, "may_be_made": secret is None}
        return Access(secret, found["store_id"], found["may_be_made"])

    def _step(self, text: str) -> None:
        self._steps.append(text)
        self._say(WORKING, steps=self._steps)

    def _is_running(self, member: Member | None) -> Callable[[restore.Restored], None]:
        def running(restored: restore.Restored) -> None:
            self._told = {"result": asdict(restored)}
            self._say(SETTLED if restored.settled else RUNNING, **self._told)
            if member is not None and restored.settled:
                member.say("settled", **self._told)

        return running

    def _say(self, state: str, **more: Any) -> None:
        part = self._files.status.with_name(".status.part")
        part.write_text(json.dumps({"state": state, **more}))
        part.rename(self._files.status)


def _read(files: Files) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(files.request.read_text())
    except (OSError, ValueError) as exc:
        raise NotFoundError(
            "nothing is to be done here",
            why=f"{files.request}: {exc}",
            remedy="see `vmckpt checkpoint --help`",
        ) from exc
    return found


def _forget_key(asked: Mapping[str, Any]) -> None:
    if asked["key"]:
        forget(Path(asked["key"]))


def _host(asked: Mapping[str, Any]) -> LocalHost:
    return LocalHost(**entry_fields(convert(Entry, asked["host"])))
