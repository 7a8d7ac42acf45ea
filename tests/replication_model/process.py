"""Processes, which can be frozen, killed, or asked to end, and the connections between them."""

import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from tests.replication_model.machine import Host
from tests.replication_model.world import Signal

# Coarser than the product's: they decide how many events a schedule has.
POLL_S, ENFORCE_POLL_S = 0.25, 0.1

Work = Coroutine[Any, None, None]


class Task:
    """A coroutine of a process."""

    __slots__ = ("_coro", "_is_running", "_proc", "_turn", "is_done")

    def __init__(self, proc: "Proc", coro: Work) -> None:
        self._proc, self._coro, self._turn = proc, coro, 0
        self.is_done = self._is_running = False

    def resume(self, turn: int) -> None:
        if turn != self._turn or self.is_done:
            return
        proc = self._proc
        if proc.is_frozen:
            proc.waiting.append((self.resume, (turn,)))
            return
        self._turn = turn = turn + 1
        self._is_running = True
        try:
            wanted = self._coro.send(None)
        except StopIteration:
            self.is_done = True
            proc.stirred.set()
            return
        finally:
            self._is_running = False
        if not proc.is_alive:  # it has ended its own process
            self._coro.close()
            return
        world = proc.world
        if type(wanted) is tuple:
            signal, seconds = wanted
            signal.waiting.append(lambda: world.at(world.now_s, self.resume, turn))
        else:
            seconds = wanted
        if seconds < math.inf:
            world.at(world.now_s + max(seconds, 0.0), self.resume, turn)

    def cancel(self) -> None:
        """It does nothing more; one that cancels itself: from its next rest on."""
        if not self.is_done:
            self.is_done = True
            if not self._is_running:
                self._coro.close()


class Proc:
    """A process on a host: it can be frozen, killed, or asked to end."""

    # Whether it stops a guest that may not run.
    enforces = False

    def __init__(self, host: Host) -> None:
        self.host, self.world = host, host.world
        self.is_alive, self.is_frozen = True, False
        self._frozen_until_s = 0.0
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._tasks: list[Task] = []
        self._inbox = deque[tuple[Any, ...]]()
        self.stirred = Signal()
        host.procs.append(self)

    def __repr__(self) -> str:
        return f"the {type(self).__name__.lower()} on {self.host.name}"

    def works(self) -> bool:
        """Asked again each time."""
        return self.is_alive and not self.is_frozen

    def begin(self, coro: Work) -> Task:
        task = Task(self, coro)
        self._tasks.append(task)
        self.world.at(self.world.now_s, task.resume, 0)
        return task

    def later(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        """Do it then, if this process is alive; when it thaws, if it is frozen."""
        self.world.at(self.world.now_s + seconds, self._now, do, *args)

    def _now(self, do: Callable[..., None], *args: Any) -> None:
        if self.is_frozen:
            self.waiting.append((self._now, (do, *args)))
        elif self.is_alive:
            do(*args)

    def freeze(self, for_s: float) -> None:
        self.is_frozen = True
        self._frozen_until_s = max(self._frozen_until_s, self.world.now_s + for_s)
        self.world.at(self.world.now_s + for_s, self._thaw)

    def _thaw(self) -> None:
        if self.is_frozen and self.world.now_s >= self._frozen_until_s:
            self.is_frozen = False
            waiting, self.waiting = self.waiting, []
            self.world.random.shuffle(waiting)  # nothing says what it comes to first
            for do, args in waiting:
                self.world.at(self.world.now_s, do, *args)

    def has_lock(self, host: Host) -> bool:
        """Take the VM's lock on that host, unless another has it."""
        if host.locked_by is None:
            host.locked_by = self
        return host.locked_by is self

    def let_go(self, host: Host) -> None:
        """Of its lock there."""
        if host.locked_by is self:
            host.locked_by = None

    def end(self) -> None:
        """It ends, with all that it does, and lets go of what it holds."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.host.procs.remove(self)
        for host in self.world.hosts:
            self.let_go(host)
        for task in self._tasks:
            task.cancel()
        self.gone()

    def arrives(self, message: tuple[Any, ...]) -> None:
        """Something has come over its connection."""
        if self.is_alive:
            self._inbox.append(message)
            self._now(self._take)

    def _take(self) -> None:
        while self._inbox and self.is_alive:
            self.hear(*self._inbox.popleft())

    def hear(self, kind: str, *what: Any) -> None:
        """What the other end says, in its order."""

    def gone(self) -> None:
        """What its end is to others, however it came."""

    def kill(self) -> None:
        """SIGKILL."""
        if self.is_alive:
            self.end()
            if self.host.is_up:
                self.killed()

    def killed(self) -> None:
        """What its dead-man's switch does."""

    def terminate(self) -> None:
        """SIGTERM."""
        self.kill()


class Wire:
    """The connection of two services: in order, and late as long as the link is down."""

    def __init__(self, ends: tuple[Proc, Proc]) -> None:
        self._ends, self._world = ends, ends[0].world
        self._last_s = [0.0, 0.0]
        self._waiting: tuple[list[Any], list[Any]] = ([], [])
        self._is_closed = [False, False]
        self._world.wires.append(self)

    def send(self, sender: Proc, kind: str, *what: Any) -> None:
        """To the other end: `hear(kind, ...)` there."""
        way = int(sender is self._ends[1])
        if self._is_closed[way] or not sender.host.is_up:
            return
        if self._world.now_s < self._world.paths_up_from_s[0]:
            self._waiting[way].append((kind, *what))
        else:
            self._leave(way, (kind, *what))

    def close(self, sender: Proc) -> None:
        """As a process ends: what it has sent still arrives, and then its end."""
        self.send(sender, "closed")
        self._is_closed[int(sender is self._ends[1])] = True

    def abort(self, sender: Proc) -> None:
        """What has not left is lost."""
        self._waiting[int(sender is self._ends[1])].clear()
        self.close(sender)

    def forget(self, host: Host) -> None:
        """That host is down: nothing of what it had to send arrives any longer."""
        for way, end in enumerate(self._ends):
            if end.host is host:
                self._waiting[way].clear()
                self._is_closed[way] = True

    def heal(self) -> None:
        """The link is up again."""
        for way, waiting in enumerate(self._waiting):
            for message in waiting:
                self._leave(way, message)
            waiting.clear()

    def _leave(self, way: int, message: tuple[Any, ...]) -> None:
        world, to = self._world, self._ends[1 - way]
        arrives_s = max(world.now_s, self._last_s[way]) + world.random.uniform(0.001, 0.04)
        self._last_s[way] = arrives_s
        world.at(arrives_s, to.arrives, message)
