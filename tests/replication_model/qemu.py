"""A QEMU with its guest, and the guard beside it."""

import math
from collections.abc import Callable

from tests.replication_model.machine import Home, Host
from tests.replication_model.process import ENFORCE_POLL_S, POLL_S, Proc
from tests.replication_model.world import Signal, State, sleep, wait
from vmckpt.replicate.primary.primary import GUARD_ANSWER_S


class QemuLostError(Exception):
    """QEMU has ended."""


class Qemu:
    """A QEMU and its guest."""

    def __init__(self, host: Host, state: State, home: Home | None) -> None:
        self.host, self.world, self.state, self.home = host, host.world, state, home
        self.id = next(self.world.ids)
        # Of memory: what boots from a disk has a new one, what a standby takes over has the same.
        self.life = self.id
        self.lives, self.runs, self.is_off = True, False, False
        self.is_held = self.is_frozen = self.is_sigstopped = False
        self.stale_since_s: float | None = None
        self._frozen_until_s = 0.0
        self.ended = Signal()
        self._asked: list[Callable[[], None]] = []
        self.world.qemus.append(self)

    def __repr__(self) -> str:
        return f"the guest on {self.host.name} ({self.state})"

    @property
    def answers(self) -> bool:
        return not (self.is_frozen or self.is_sigstopped)

    @property
    def is_loose(self) -> bool:
        """Whether what its guest sends reaches the world."""
        return (
            self.lives and self.runs and not (self.is_held or self.is_frozen or self.is_sigstopped)
        )

    def has_ended(self) -> bool:
        """Asked again each time."""
        return not self.lives

    def freeze(self, for_s: float) -> None:
        self._frozen_until_s = max(self._frozen_until_s, self.world.now_s + for_s)
        self.set(is_frozen=True)
        self.world.at(self.world.now_s + for_s, self._thaw)

    def _thaw(self) -> None:
        if self.world.now_s >= self._frozen_until_s:
            self.set(is_frozen=False)

    def step(self) -> None:
        """The guest has got on, and what it did is on its disk."""
        self.state = self.state[0], self.state[1] + 1
        if self.home is not None:
            self.home.disk = self.state

    def cont(self) -> None:
        self.set(runs=True)

    def stop(self) -> None:
        self.set(runs=False)

    def set(self, **now: bool) -> None:
        """Change what is given, and see to it that the law is kept."""
        for name, value in now.items():
            setattr(self, name, value)
        if self.lives and self.answers and self._asked:
            asked, self._asked = self._asked, []
            for do in asked:
                do()
        self.world.look()

    def queue(self, do: Callable[[], None]) -> list[bool]:
        """Have it do that, now or when it answers again; what is given has something by then."""
        done = list[bool]()

        def now() -> None:
            do()
            done.append(True)

        if self.lives and self.answers:
            now()
        else:
            self._asked.append(now)
        return done

    async def ask(self, do: Callable[[], None]) -> None:
        """The same, and wait until it is done. Raises QemuLostError."""
        done = self.queue(do)
        while not done:
            if not self.lives:
                raise QemuLostError
            await sleep(POLL_S)

    def end(self, *, is_off: bool = False) -> None:
        if self.lives:
            self.lives, self.is_off = False, is_off
            self.ended.set()


class Guard(Proc):
    """epoch/guard.py: the guest runs for no longer than is told, whatever its teller does."""

    enforces = True

    def __init__(self, qemu: Qemu) -> None:
        super().__init__(qemu.host)
        self._qemu, self._until_s, self._teller_lives = qemu, math.inf, True
        self._told = Signal()
        self._unanswered_since_s = math.inf
        self.begin(self._watch())

    def tell(self, line: str) -> None:
        """Raises OSError as `Attendant` does."""
        world = self.world
        if "R6" in world.without:
            self.arrives(("told", float(line)))
            return
        if not self.is_alive:
            raise BrokenPipeError(32, "it has died")
        if world.now_s - self._unanswered_since_s > GUARD_ANSWER_S:
            raise TimeoutError(110, "no answer")
        self._unanswered_since_s = min(self._unanswered_since_s, world.now_s)
        self.arrives(("told", float(line)))

    def hear(self, kind: str, *what: object) -> None:
        match kind, *what:
            case "told", float(until_s):
                self._unanswered_since_s, self._until_s = math.inf, until_s
            case _:  # its teller has died
                self._teller_lives = False
                qemu = self._qemu
                if self.host.clock() < self._until_s and qemu.lives and qemu.answers:
                    qemu.cont()  # it was paused for an epoch, if it did
        self._told.set()

    def terminate(self) -> None:
        """It ignores SIGTERM."""

    async def _watch(self) -> None:
        qemu = self._qemu
        while qemu.lives:
            left_s = self.host.true_s(self._until_s)
            if left_s > 0:
                if qemu.is_sigstopped:
                    qemu.set(is_sigstopped=False)
                if not self._teller_lives and left_s == math.inf:
                    break
                await wait(self._told, left_s)
                continue
            if not qemu.answers:
                if qemu.runs:
                    qemu.set(is_sigstopped=True)
            elif qemu.runs:
                qemu.stop()
            if not self._teller_lives:
                if qemu.is_sigstopped:
                    qemu.end()
                break
            await wait(self._told, ENFORCE_POLL_S)
        self.end()
