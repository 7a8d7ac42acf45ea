"""Schedules of faults and commands: made from a seed, played to a good end, made smaller.

`python -m tests.replication_model.schedule SEED [WITHOUT]` plays one and prints what happened;
`... FIRST-END` plays many.
"""

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from tests.replication_model.asking import (
    FAILOVER,
    FAILOVER_DEAD,
    KEEP,
    MOVE,
    PROTECT,
    START,
    STOP,
    STOP_GONE,
    STOP_OFF,
    WAIT,
    boot,
    others_of,
)
from tests.replication_model.machine import Home, Host
from tests.replication_model.operator import Command
from tests.replication_model.plans import COMMANDS, plan_of
from tests.replication_model.primary import Primary
from tests.replication_model.qemu import Guard
from tests.replication_model.standby import NOT_LOADED, Standby
from tests.replication_model.unattended import Autostart, Keep
from tests.replication_model.world import Act, Plan, State, ViolationError, World
from vmckpt.replicate.operator.keep import LONGEST_S
from vmckpt.replicate.standby.takeover import COPY_SILENCE_S

# How long a host takes from SIGTERM to SIGKILL.
GRACE_S = 15.0
SETTLE_S, FINE_S, COMMAND_S, ROUNDS = 45.0, 3.0, 200.0, 8


class Schedule:
    """One plan, as it is played."""

    def __init__(self, plan: Plan, without: frozenset[str] = frozenset()) -> None:
        self.plan, self.world = plan, World(plan, without)
        world = self.world
        drifts = itertools.chain(plan.drift, itertools.repeat(0.0))
        world.hosts = tuple(
            Host(world, name, drift) for name, drift in zip(plan.names, drifts, strict=False)
        )
        self._a = world.hosts[0]
        self._desk = Host(world, "desk")
        self._commands: list[Command] = []
        # The memory of the guest that has to go on: no more than one thing befalls it.
        self._life: int | None = None
        self._a.home = Home(0, (0, 0))
        boot(self._a)

    def play(self) -> None:
        """All of it. Raises ViolationError."""
        world = self.world
        try:
            for act in self.plan.acts:
                world.play(world.now_s + act.after_s)
                self._do(act)
            world.play(world.now_s + 1.0)
            self._end()
        finally:
            self._close()

    def _close(self) -> None:
        for host in (*self.world.hosts, self._desk):
            host.is_up = False
            for proc in list(host.procs):
                proc.end()

    # -- acts ------------------------------------------------------------------------------------

    def _do(self, act: Act) -> None:
        world = self.world
        host = self._host(act.on)
        if act.kind not in (*COMMANDS, FAILOVER_DEAD, MOVE, KEEP):
            self._expect(act, host)
        if not self._is_so(act.kind):
            return
        world.note(f"-- {act.kind} {host.name} {act.for_s:.2f}")
        world.seen[act.kind] += 1
        until_s = world.now_s + act.for_s
        match act.kind.split():
            case ["cut", what]:
                self._cut_off(what, host, until_s)
            case ["isolate"]:
                self._cut_off("arbiter", host, until_s)
                self._cut_off("link", host, until_s)
            case ["lose" | "stop" as how, "arbiter"]:
                world.is_arbiter_lost |= how == "lose"
                for one in world.hosts:
                    one.to_arbiter_from_s = until_s
            case ["keep"]:
                Keep(self._desk, world.hosts, act.on or self.plan.names, act.for_s).run(KEEP)
            case _ if act.kind in (*COMMANDS, FAILOVER_DEAD, MOVE):
                self._command(act.kind, host)
            case ["kill" | "freeze" as how, "command"]:
                self._break_off(how, act.for_s)
            case [what, whom]:
                self._hurt(what, whom, host, act.for_s)
            case [what]:
                self._take_down(what, host, act.for_s)

    def _break_off(self, how: str, for_s: float) -> None:
        """All commands that are under way."""
        for proc in list(self._desk.procs):
            if how == "kill":
                proc.kill()
            else:
                proc.freeze(for_s)

    def _is_so(self, command: str) -> bool:
        """Whether the operator may say what it says."""
        if command == STOP_OFF:
            return self._is_off()
        return command != FAILOVER_DEAD or self._is_dead()

    def _is_dead(self) -> bool:
        """Whether what the operator would say of a primary is so: all but its standby is off."""
        return any(
            host.find(Standby)
            and not any(other.is_up for other in others_of(self.world.hosts, host))
            for host in self.world.hosts
        )

    def _cut_off(self, what: str, host: Host, until_s: float) -> None:
        if what == "arbiter":
            host.to_arbiter_from_s = until_s
        elif what == "operator":
            host.to_operator_from_s = until_s
        else:
            for path in (0, 1) if what == "link" else (0,):
                self.world.paths_up_from_s[path] = until_s
            self.world.at(until_s, self._heal)

    def _heal(self) -> None:
        if self.world.now_s >= self.world.paths_up_from_s[0]:
            for wire in self.world.wires:
                wire.heal()

    def _take_down(self, how: str, host: Host, for_s: float) -> None:
        """The whole host."""
        world = self.world
        if how == "stall":
            for one in list(host.procs):
                one.freeze(for_s)
            for qemu in host.qemus:
                qemu.freeze(for_s)
        elif how == "crash":
            if host.is_up:
                host.go_down()
                world.at(world.now_s + for_s, self._come_up, host)
        elif how == "shutdown":
            if host.is_up:
                self._shut_down(host, for_s)
        elif not any(one.is_gone for one in world.hosts):
            self._destroy(host)

    def _host(self, on: str) -> Host:
        for host in self.world.hosts:
            if host.name == on:
                return host
        role = Standby if on == "standby" else Primary
        for host in self.world.hosts:
            if host.find(role):
                return host
        return self._a

    def _hurt(self, what: str, whom: str, host: Host, for_s: float) -> None:
        """A process on it."""
        if whom == "qemu":
            for qemu in host.qemus:
                if what == "freeze":
                    qemu.freeze(for_s)
                elif what == "kill" or (qemu.runs and qemu.answers):
                    qemu.end(is_off=what != "kill")
            return
        kinds = (Guard,) if whom == "guard" else (Primary, Standby)
        for proc in [one for one in host.procs if isinstance(one, kinds)]:
            if what == "kill":
                proc.kill()
            elif what == "freeze":
                proc.freeze(for_s)
            else:
                proc.terminate()

    def _is_off(self) -> bool:
        """Whether all that are silent are, as the operator says, who takes what the others have for
        good enough.
        """
        left = [host for host in self.world.hosts if host.is_up]
        is_unheard = any(self.world.now_s < host.to_arbiter_from_s for host in left)
        if self.plan.is_careful and is_unheard:
            return False
        if len(left) == len(self.world.hosts) or not all(host.answers for host in left):
            return False
        self._forgive(left)
        return True

    def _forgive(self, left: list[Host]) -> None:
        """What only the others had is lost."""
        self.world.forgive([state for host in left for state in _states_of(host)])

    def _destroy(self, host: Host) -> None:
        host.go_down()
        host.is_gone = True
        host.home = host.files = None
        self._forgive(others_of(self.world.hosts, host))

    def _shut_down(self, host: Host, for_s: float) -> None:
        """SIGTERM to all, in no order; what lives on is ended with the power."""
        world = self.world
        for proc in list(host.procs):
            world.at(world.now_s + world.random.choice([0.0, 0.3]), proc.terminate)
        for qemu in host.qemus:
            world.at(world.now_s + world.random.choice([0.0, 0.05, 1.0]), qemu.end)
        world.at(world.now_s + GRACE_S, host.go_down)
        world.at(world.now_s + max(for_s, GRACE_S + 1), self._come_up, host)

    def _come_up(self, host: Host) -> None:
        if not host.is_up and host.come_up() and self.plan.autostarts:
            Autostart(host, self.world.hosts).run("autostart")

    def _command(self, kind: str, on: Host | None = None) -> Command:
        command = Command(self._desk, self.world.hosts).run(kind, on)
        self._commands.append(command)
        return command

    def _expect(self, act: Act, host: Host) -> None:
        """One thing befalls a guest that is protected: its memory has to outlive that."""
        faults = [one for one in self.plan.acts if one.kind not in (*COMMANDS, MOVE, KEEP)]
        others = [one for one in self.plan.acts if one.kind in (START, FAILOVER, STOP, MOVE)]
        if act.kind == "poweroff qemu":
            return
        is_one = len(faults) == 1 and not others
        for one in host.world.hosts:
            for primary in one.find(Primary):
                if isinstance(primary, Primary) and primary.is_safe and is_one:
                    self._life = primary.qemu.life

    # -- the end ---------------------------------------------------------------------------------

    def _end(self) -> None:
        """Faults cease, and the operator follows what commands say, until the VM runs."""
        world = self.world
        self._heal_all()
        self._until_fine(SETTLE_S)
        lives = [qemu.life for qemu in world.qemus if qemu.lives]
        if self._life not in (None, *lives) and not world.seen[NOT_LOADED]:
            raise ViolationError("the guest's memory was lost by a single fault, though protected")
        said: list[str] = []
        for _ in range(ROUNDS):
            if self._until_fine(FINE_S):
                break
            is_gone = any(host.is_gone for host in world.hosts)
            if is_gone and all(host.home is None for host in world.hosts):
                self._require_no_useless_standby()
                world.count("gone with its host")
                return
            said += self._obey(START, set())
        else:
            raise ViolationError(f"the VM does not run again: {'; '.join(said[-6:])}")
        if self.plan.seed % 3 == 0 and not world.is_arbiter_lost:
            self._require_protectable()

    def _require_no_useless_standby(self) -> None:
        """One without a complete epoch of a guest that is gone has ended: the VM's name is free."""

        def is_free() -> bool:
            return all(
                proc.state is not None
                for host in self.world.hosts
                for proc in host.procs
                if isinstance(proc, Standby)
            )

        self.world.play(self.world.now_s + COPY_SILENCE_S + FINE_S, is_free)
        if not is_free():
            raise ViolationError("a standby that is of no use does not end")

    def _heal_all(self) -> None:
        world = self.world
        world.trouble = 0.0
        world.play(world.now_s + GRACE_S + 1.5)
        world.paths_up_from_s = [world.now_s, world.now_s]
        self._heal()
        for host in world.hosts:
            host.to_arbiter_from_s = host.to_operator_from_s = world.now_s
            self._come_up(host)

    def _until_fine(self, at_most_s: float) -> bool:
        """Whether the guest is heard, within that time."""
        world = self.world
        heard, until_s = world.let_out, world.now_s + at_most_s
        while world.now_s < until_s:
            world.play(world.now_s + 0.7)
            if world.let_out != heard:
                return True
        return False

    def _obey(self, kind: str, tried: set[str]) -> list[str]:
        """That command, and if it is refused what it says is to be done."""
        world = self.world
        tried.add(kind)
        command = self._command("stop" if kind == "stop" else kind)
        until_s = world.now_s + COMMAND_S
        world.play(until_s, lambda: command.is_done)
        if command.error is None:
            return [f"{kind}: {'done' if command.is_done else 'hangs'}"]
        said = [f"{kind}: {command.error}"]
        for remedy in command.error.remedies:
            if remedy == WAIT:
                self._until_fine(FINE_S)
            if remedy in tried or remedy not in (*COMMANDS, STOP_GONE, FAILOVER_DEAD):
                continue
            if remedy == STOP_OFF and all(host.is_up for host in world.hosts):
                continue
            if remedy == FAILOVER_DEAD and not world.is_arbiter_lost:
                continue
            if remedy == STOP_GONE and not any(host.is_gone for host in world.hosts):
                continue
            said += self._obey(remedy, tried)
            if said[-1].endswith("done"):
                break
        return said

    def _require_protectable(self) -> None:
        """It may be protected again, wherever it runs now."""
        if any(host.is_gone for host in self.world.hosts) or self._is_protected():
            return
        self.world.play(self.world.now_s + 2 * LONGEST_S, self._is_left_to_the_operator)
        said: list[str] = []
        for _ in range(0 if self._is_protected() else 3):
            said += self._obey(PROTECT, set())
            if self._is_protected():
                return
        if self._is_protected():
            return
        raise ViolationError(f"the VM cannot be protected again: {'; '.join(said[-6:])}")

    def _is_left_to_the_operator(self) -> bool:
        """Whether it is protected, or no command that is under way will do that."""
        is_begun = any(host.begun_by for host in self.world.hosts)
        return self._is_protected() or not (is_begun or self._desk.find(Keep))

    def _is_protected(self) -> bool:
        return any(
            isinstance(proc, Primary) and proc.is_safe
            for host in self.world.hosts
            for proc in host.procs
        )


def _states_of(host: Host) -> list[State]:
    """What a host has of the guest."""
    states = [qemu.state for qemu in host.qemus]
    states += [host.home.disk] if host.home is not None else []
    return states + [one.state for one in host.procs if isinstance(one, Standby) and one.state]


def played(plan: Plan, without: frozenset[str] = frozenset()) -> tuple[World, str]:
    """The world after it, and which law was broken; "": none."""
    schedule = Schedule(plan, without)
    try:
        schedule.play()
    except ViolationError as exc:
        return schedule.world, str(exc)
    return schedule.world, ""


def minimised(plan: Plan, without: frozenset[str] = frozenset()) -> Plan:
    """A plan with as little as possible in it that breaks a law still."""
    smaller = [
        replace(plan, acts=plan.acts[:number] + plan.acts[number + 1 :])
        for number in range(len(plan.acts))
    ]
    smaller += [replace(plan, trouble=0.0), replace(plan, drift=(0.0, 0.0)), replace(plan, proof=0)]
    for one in smaller:
        if one != plan and played(one, without)[1]:
            return minimised(one, without)
    return plan


def first_violation(
    seeds: Iterable[int],
    without: frozenset[str] = frozenset(),
    seen: Counter[str] | None = None,
    *,
    of: Callable[[int], Plan] = plan_of,
) -> tuple[int, str] | None:
    """The first seed whose schedule (`of` it) breaks a law, and which; None: none does."""
    for seed in seeds:
        world, broken = played(of(seed), without)
        if seen is not None:
            seen += world.seen
            seen["events"] += world.events
            seen["virtual s"] += round(world.now_s)
        if broken:
            return seed, broken
    return None


def main(which: str, *without: str) -> None:
    taken_out = frozenset(without)
    first, _, end = which.partition("-")
    if not end:
        plan = plan_of(int(first))
        if played(plan, taken_out)[1]:
            plan = minimised(plan, taken_out)
        print(plan)
        world, broken = played(plan, taken_out)
        for at_s, what in world.log:
            print(f"{at_s:8.3f} {what}")
        print(broken or "no law was broken")
        return
    began_s, seen, broken_by = time.process_time(), Counter[str](), list[tuple[int, str]]()
    at = int(first)
    while (found := first_violation(range(at, int(end)), taken_out, seen)) is not None:
        broken_by.append(found)
        print(f"seed {found[0]}: {found[1]}", flush=True)
        at = found[0] + 1
        if len(broken_by) == 20:
            break
    took_s = time.process_time() - began_s
    for what, times in sorted(seen.items()):
        print(f"{times:10} {what}")
    print(f"{int(end) - int(first)} schedules, {len(broken_by)} broke a law, {took_s:.1f} s of CPU")


if __name__ == "__main__":
    main(*sys.argv[1:])
