"""The standby's service: follow the primary epoch by epoch; go on with the guest when it is dead.

What it does next is `lease/standby.py`'s decision, over what the arbiter says and what was heard.
The primary is fenced only right after the arbiter has said that this replica may take over: one
that has gone on alone has told it so before.
"""

import asyncio
import json
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from vmckpt.errors import HostDownError, OperationFailedError, RefusedError, VmckptError
from vmckpt.hosts.process import ProcessId
from vmckpt.hosts.remote.tls import is_invited, listening, token_of
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import Span
from vmckpt.lease.rule import Claimant, Holding
from vmckpt.lease.standby import Fencing, Move, View, decide
from vmckpt.replicate.arbiter import open_arbiter
from vmckpt.replicate.channel import ALONE, GUEST_OFF, PATIENCE_S, STOPPED, Channel
from vmckpt.replicate.control import answering
from vmckpt.replicate.fencing.agent import Agent, Target, this_machine
from vmckpt.replicate.following import Following
from vmckpt.replicate.replica import Replica, replica_in
from vmckpt.replicate.request import PROMOTED, Files, Request, read_request
from vmckpt.replicate.stale import remove_stale_home
from vmckpt.replicate.warm import Warm
from vmckpt.replicate.wire.messages import Failure, Hello
from vmckpt.sequence.steps import to_the_end
from vmckpt.vm.argv import Platform
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path, vm_dir
from vmckpt.vm.spec import parse_spec
from vmckpt.vm.start import sweep

# Twice as long as the primary waits before it goes on alone: by now it has, if it can.
SILENCE_S, MARGIN_S = 2 * PATIENCE_S, 0.05
COME_S, TICK_S = 60.0, 0.02


async def serve_standby(directory: Path) -> None:
    """All of it, from the waiting QEMU to its end or the take-over.

    Raises RefusedError, OperationFailedError, HostDownError, OSError: nothing of it is left.
    """
    request, files = read_request(directory), Files(directory)
    host, lock = request.standby, lock_path(request.standby.state_dir, request.vm)
    async with AsyncExitStack() as stack:
        action = f"standby of {request.primary.name}"
        await stack.enter_async_context(host.lock(lock, owner(action, request.run)))
        if await read_vm(host, request.vm):
            raise RefusedError(
                f"{host.name} has a VM '{request.vm}' already",
                why="the standby of a VM is another host",
                remedy="choose another standby, or remove the VM there",
            )
        directory_ = vm_dir(host.state_dir, request.vm)
        await host.make_dir(directory_.path)
        spec = parse_spec(request.spec, str(directory_.spec), directory_.path)
        await sweep(host, spec, directory_, None)  # of a standby that was killed
        warm = await Warm.start(host, spec, Platform(**request.platform))
        standby = Standby(request, files, warm)
        try:
            with replica_in(warm.qemu.files.ram(spec.ram_dir)) as replica:
                await standby.serve(replica)
        finally:
            await to_the_end(standby.finish())


class Standby:
    """One standby, from its first visitor to its end."""

    def __init__(self, request: Request, files: Files, warm: Warm) -> None:
        self._request, self._files, self._warm = request, files, warm
        self.name = f"{request.standby.name}/{request.run}"
        span = Span(request.options.lease_s)
        claimant = Claimant(self.name, replica=self.name)
        self._lease = Lease(open_arbiter(request.options), request.vm, claimant, span)
        self._ended, self._why = "", ""
        self._may_have_run = False
        self._dead: Holding | None = None
        self._fencing = Fencing.READY
        self._asked_to_take_over = asyncio.Event()
        self._took_over_s: float | None = None
        self._replica: Replica | None = None
        self._following: Following | None = None

    async def serve(self, replica: Replica) -> None:
        """Follow the primary; returns when this standby has taken over, or is of no use."""
        self._replica, self._following = replica, Following(self.name, replica)
        token = token_of(self._files.path)
        came: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        left = asyncio.Event()

        async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                if await is_invited(reader, token) and not came.done():
                    came.set_result(Channel(reader, writer, 0))
                    await left.wait()
            except (OSError, ValueError, TimeoutError):
                return  # it spoke nothing that we know
            finally:
                writer.transport.abort()

        async with (
            answering(self._files.control, self._answer),
            await listening(self._files.path, visit),
        ):
            try:
                channel = await asyncio.wait_for(came, COME_S)
                await self._follow(channel, replica, self._following)
            except TimeoutError:
                self._why = f"the primary did not come within {COME_S:g} s"
            finally:
                left.set()

    async def finish(self) -> None:
        """Whatever happened: leave the guest running, or nothing."""
        if self._may_have_run:
            self._ended = PROMOTED
            await self._warm.close()
        else:
            self._ended = "ended"
            await self._warm.end()
        await self._write_status()

    async def _follow(self, channel: Channel, replica: Replica, primary: Following) -> None:
        """Receive until the primary has gone, then see what is to be done."""
        receiving = asyncio.ensure_future(primary.receive(channel))
        ended = asyncio.ensure_future(self._warm.ended())
        try:
            while True:
                await asyncio.wait(
                    {receiving, ended}, timeout=0.25, return_when=asyncio.FIRST_COMPLETED
                )
                if ended.done():
                    await self._say_that_qemu_died(channel)
                    return
                if receiving.done() and receiving.result() in (STOPPED, GUEST_OFF, ALONE):
                    return
                is_silent = boottime_s() - primary.heard_s > SILENCE_S
                if not (receiving.done() or is_silent or self._asked_to_take_over.is_set()):
                    continue
                if await self._see_to_it(replica, primary, receiving):
                    return
        finally:
            receiving.cancel()
            ended.cancel()
            await asyncio.wait({receiving, ended})
            channel.abort()

    async def _say_that_qemu_died(self, channel: Channel) -> None:
        self._why = "the QEMU that waited here has ended"
        with suppress(HostDownError):
            await channel.fail(Failure(ALONE, "the standby is of no use any more", self._why, "-"))

    async def _see_to_it(
        self, replica: Replica, primary: Following, receiving: "asyncio.Future[str]"
    ) -> bool:
        """The primary is silent, dead, or has asked: take over as soon as that is safe.

        False when it is heard again.
        """
        while True:
            try:
                await self._lease.look()
            except VmckptError as exc:
                self._why = f"no answer from the arbiter: {exc.why}"
                await asyncio.sleep(TICK_S)
                continue
            is_heard = not receiving.done() or await self._service_lives(primary)
            move = decide(
                self._view(replica, primary, is_heard=is_heard),
                now_s=boottime_s(),
                margin_s=MARGIN_S,
                silence_s=SILENCE_S,
            )
            if move in (Move.STALE, Move.STAND_DOWN):
                self._why = f"{primary.why or 'the primary is silent'}; {move.value}"
                return True
            if move is Move.FENCE:
                await self._fence(primary)
            elif move in (Move.TAKE, Move.RENEW):
                await self._take()
            elif move is Move.PROMOTE:
                receiving.cancel()
                await asyncio.wait({receiving})
                await to_the_end(self._promote(replica))
                return True
            elif move is Move.FOLLOW and not receiving.done():
                return False
            else:
                await asyncio.sleep(TICK_S)

    async def _service_lives(self, primary: Following) -> bool:
        """Whether whoever closed the connection may be alive: then it goes on alone, and says so.

        Fencing it in that moment would be the guest's end.
        """
        if primary.hello is None or primary.hello.machine != this_machine():
            return True
        service = primary.hello.emitters[0]
        which = ProcessId(service.pid, service.start_ticks)
        return await self._request.primary.is_alive(which)

    def _view(self, replica: Replica, primary: Following, *, is_heard: bool) -> View:
        held = self._lease.held
        is_heard = is_heard and not self._asked_to_take_over.is_set()
        return View(
            me=self._lease.claimant,
            complete=replica.complete,
            follows_term=primary.term,
            heard_s=(primary.heard_s,) if is_heard else (),
            seen=self._lease.seen,
            fencing=self._fencing,
            dead=self._dead,
            term=held.term if held else 0,
            held_until_s=self._lease.held_until_s,
        )

    async def _fence(self, primary: Following) -> None:
        """Kill all that can act for the primary, with this kernel's word that it is dead."""
        self._fencing = Fencing.NONE
        seen, hello = self._lease.seen, primary.hello
        if hello is None or seen is None:
            return
        holding = Holding(seen.now.record.term, seen.now.record.holder)
        if hello.machine != this_machine():
            await self._fence_by_agent(hello, holding)
            return
        for emitter in hello.emitters:
            which = ProcessId(emitter.pid, emitter.start_ticks)
            if not await self._request.primary.stop_for_good(which):
                self._why = f"process {which.pid} of the primary does not end"
                return
        self._dead = holding

    async def _fence_by_agent(self, hello: Hello, holding: Holding) -> None:
        if not self._request.options.fence:
            return
        target = Target(hello.vm, holding, hello.host, hello.machine, hello.emitters)
        try:
            self._dead = (await Agent(self._request.options.fence).fence(target)).holding
        except OperationFailedError as exc:
            self._why = f"{exc.what}: {exc.why}"

    async def _take(self) -> None:
        try:
            if self._lease.held is None:
                await self._lease.take(self._dead)
            else:
                await self._lease.renew()
        except VmckptError as exc:
            self._why = exc.why
            await asyncio.sleep(TICK_S)

    async def _promote(self, replica: Replica) -> None:
        began_s = time.perf_counter()
        try:
            await self._warm.load(replica.device_state)
        except OperationFailedError as exc:
            self._why = exc.why
            return
        await self._warm.settle_here()
        self._may_have_run = True  # from here on this QEMU is never ended
        await self._warm.run()
        self._took_over_s = time.perf_counter() - began_s
        await self._warm.announce()
        self._ended = PROMOTED
        self._why = f"took over from {self._request.primary.name} at epoch {replica.epoch}"
        await self._write_status()
        asked, primary = self._request, self._request.primary
        if asked.one_machine:
            await remove_stale_home(primary, asked.vm, asked.qemu_id)
            await primary.remove(Files.of(primary, asked.vm).path)

    async def _answer(self, word: str) -> dict[str, Any]:
        if word == "failover":
            self._asked_to_take_over.set()
            while not self._ended:  # noqa: ASYNC110
                await asyncio.sleep(TICK_S)
        return self.status()

    def status(self) -> dict[str, Any]:
        """How it is, for people and programs."""
        replica, held, primary = self._replica, self._lease.held, self._following
        return {
            "role": "standby",
            "vm": self._request.vm,
            "run": self._request.run,
            "primary": self._request.primary.name,
            "standby": self._request.standby.name,
            "state": self._ended or self._stage(),
            "why": self._why or (primary.why if primary else ""),
            "term": held.term if held else primary.term if primary else 0,
            "epoch": replica.epoch if replica else 0,
            "complete": bool(replica and replica.complete),
            "heard_ms_ago": round((boottime_s() - primary.heard_s) * 1e3, 1) if primary else None,
            "received_bytes": primary.received_bytes if primary else 0,
            "qemu_id": self._warm.qemu.files.qemu_id,
            "primary_qemu_id": self._request.qemu_id,
            "took_over_ms": round(self._took_over_s * 1e3, 2) if self._took_over_s else None,
        }

    def _stage(self) -> str:
        if self._following is None or self._following.hello is None:
            return "waiting"
        return "following" if self._replica and self._replica.complete else "copying"

    async def _write_status(self) -> None:
        await self._request.standby.write_text(self._files.status, json.dumps(self.status()))
