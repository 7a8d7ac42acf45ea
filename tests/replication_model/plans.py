"""Schedules of faults and commands, each made from a seed."""

from random import Random

from tests.replication_model.asking import (
    FAILOVER,
    FAILOVER_DEAD,
    KEEP,
    MOVE,
    PROTECT,
    START,
    STOP,
    STOP_OFF,
)
from tests.replication_model.world import Act, Plan

COMMANDS = (START, PROTECT, FAILOVER, STOP, STOP_OFF)
ON_HOSTS = (
    "crash", "shutdown", "destroy", "stall", "cut arbiter", "cut operator", "isolate",
)  # fmt: skip
ON_PROCESSES = (
    "kill service", "kill qemu", "kill guard", "freeze service", "freeze qemu", "freeze guard",
    "terminate service", "poweroff qemu",
)  # fmt: skip
ENFORCERS = ("freeze guard", "freeze service", "kill guard", "freeze qemu")
BETWEEN = ("cut link", "cut path", "stop arbiter", "kill command")
# What befalls a VM on its way back, and the operator's command for it.
ON_THE_WAY = (
    "crash", "crash", "shutdown", "kill service", "terminate service", "kill qemu", "cut link",
    "stop arbiter", "isolate", "kill command", "freeze command",
)  # fmt: skip


def plan_of(seed: int) -> Plan:
    """The schedule of that seed: of any kind, or of one in which a law is easily broken."""
    random = Random(seed)
    kind = random.choice([_any, _any, _any, _one, _pair, _cut_off, _back, _off, _both])
    others = {3: _three, 5: _way_back, 9: _stopped, 11: _operators, 13: _storm}
    kind = others.get(seed % 16, kind)
    acts = kind(random)
    if random.random() < 0.97:
        acts.insert(0, Act(random.choice([0.2, 0.5]), PROTECT))
    if seed % 8 == 7:
        place = random.randint(1, len(acts))
        acts.insert(place, Act(random.choice([0.1, 2.0, 8.0]), "lose arbiter"))
    return Plan(
        seed=seed,
        acts=tuple(acts),
        trouble=random.choice(_TROUBLE.get(kind, [0.0, 0.0, 0.05, 0.2])),
        holds_output=random.random() < (0.3 if kind is _pair else 0.8),
        proof=random.choice([0.0, 0.0, 0.6, 1.0]),
        drift=_opposite(random) if kind is _storm else (_drift(random), _drift(random)),
        slow_s=random.choice([0.0, 0.0, 5.0]),
        is_careful=kind in (_three, _stopped),
        names="abc" if kind is _three else "ab",
        unfit=random.choice([0.0, 0.5]) if kind is _three else 0.0,
    )


def moving_plan_of(seed: int) -> Plan:
    """The schedule of that seed in which the VM is also migrated, among three hosts."""
    random = Random(seed)
    acts = [Act(0.3, PROTECT, random.choice("bc")), _fault(random, 5.0)]
    for _ in range(random.choice([2, 3, 4, 6])):
        after_s = random.choice([1.0, 6.0, 20.0, 60.0]) * random.random()
        kind = random.choice([MOVE, MOVE, START, PROTECT, PROTECT, FAILOVER, STOP])
        acts.append(Act(after_s, kind, random.choice("abc")))
        if random.random() < 0.6:
            fault = _fault(random, random.choice([0.3, 3.0, 10.0]) * random.random())
            acts.append(fault._replace(on=random.choice(["primary", "standby", *"abc"])))
    return Plan(
        seed=seed,
        acts=tuple(act for act in acts if act.kind != "destroy"),
        trouble=random.choice([0.0, 0.0, 0.05]),
        proof=random.choice([0.0, 1.0]),
        slow_s=random.choice([0.0, 0.0, 5.0]),
        is_careful=True,
        names="abc",
    )


def kept_plan_of(seed: int) -> Plan:
    """The schedule of that seed in which `keep` protects the VM, and hosts start it at boot."""
    random = Random(seed)
    acts = [Act(0.3, KEEP, random.choice(["", "ab"]), random.choice([0.0, 0.0, 30.0, 90.0]))]
    if random.random() < 0.5:
        acts.insert(0, Act(0.2, PROTECT, random.choice("bc")))
    acts.append(_fault(random, 14.0))
    for _ in range(random.choice([0, 1, 2, 3, 4])):
        after_s = random.choice([0.5, 6.0, 20.0, 60.0]) * random.random()
        acts.append(_fault(random, after_s)._replace(on=random.choice(["primary", *"abc"])))
        if random.random() < 0.4:
            kind = random.choice([START, PROTECT, FAILOVER, STOP, STOP_OFF, MOVE])
            acts.append(
                Act(random.choice([0.5, 6.0, 20.0]) * random.random(), kind, "abc"[seed % 3])
            )
    kind = random.choice(["power cut", "unseen", "", ""])
    if kind == "unseen":  # a host is back, and does not see the one that took the VM over
        acts[-1:] = [Act(14.0, "isolate", "a", 15.0)] if random.random() < 0.5 else []
        acts.append(Act(20.0 + 10.0 * random.random(), "crash", "a", random.uniform(10.0, 30.0)))
        acts.append(Act(10.0 * random.random(), "cut link", for_s=90.0))
    if kind == "power cut":
        first = Act(random.choice([2.0, 12.0, 30.0]) * random.random(), "crash", "abc"[seed % 3])
        acts += [first, Act(random.choice([0.0, 0.5, 4.0]), "crash", "abc"[(seed + 1) % 3])]
    for at, act in enumerate(acts):
        if act.kind in ("crash", "shutdown") and random.random() < 0.6:
            acts[at] = act._replace(for_s=random.uniform(10.0, 90.0))
    return Plan(
        seed=seed,
        acts=tuple(act for act in acts if act.kind not in ("destroy", "kill command")),
        trouble=random.choice([0.0, 0.0, 0.05]),
        proof=random.choice([0.0, 1.0]),
        slow_s=random.choice([0.0, 0.0, 5.0]),
        is_careful=True,
        names=random.choice(["ab", "abc"]),
        autostarts=random.random() < 0.7,
    )


def _drift(random: Random) -> float:
    return random.choice([-1.0, 0.0, 1.0])


def _opposite(random: Random) -> tuple[float, float]:
    """Clocks that part as fast as the lease allows for."""
    return random.choice([(1.0, -1.0), (-1.0, 1.0)])


def _any(random: Random) -> list[Act]:
    acts = [_fault(random, 4.0 + 3 * random.random())]
    for _ in range(random.choice([0, 0, 1, 1, 2, 2, 3, 4, 5, 8])):
        after_s = random.choice([0.3, 0.3, 2.0, 6.0]) * random.random()
        acts.append(_fault(random, after_s) if random.random() < 0.8 else _asked(random, after_s))
    return acts


def _one(random: Random) -> list[Act]:
    """One thing, which the guest has to outlive."""
    fault = _fault(random, 4.0 + 3 * random.random())
    if random.random() < 0.4:
        return [fault._replace(kind=random.choice(["shutdown", "crash"]), on="primary")]
    return [fault]


def _pair(random: Random) -> list[Act]:
    """Two things at once, which last longer than a lease."""
    acts = [_fault(random, after_s)._replace(for_s=20.0) for after_s in (5.0, random.random())]
    if random.random() < 0.5:
        kinds = random.choice(ENFORCERS), random.choice(["isolate", "cut arbiter", "cut link"])
        acts = [
            act._replace(kind=kind, on="primary") for act, kind in zip(acts, kinds, strict=True)
        ]
    return [*acts, *(_asked(random, 10.0) for _ in range(random.choice([0, 1])))]


def _both(random: Random) -> list[Act]:
    """Both hosts are rebooted, or all that could stop the guest is frozen while it is cut off."""
    if random.random() < 0.5:
        kinds, hosts = ("crash", "shutdown"), ("primary", "standby")
        reboots = [Act(0.0, random.choice(kinds), host, random.uniform(1, 30)) for host in hosts]
        acts = [reboots[0]._replace(after_s=5.0), reboots[1]._replace(after_s=random.random() * 4)]
    else:
        cut = random.choice(["isolate", "cut arbiter", "cut link"])
        kinds_ = ["freeze service", "freeze guard", cut]
        random.shuffle(kinds_)
        acts = [Act(random.random() / 4, kind, "primary", 20.0) for kind in kinds_]
        acts[0] = acts[0]._replace(after_s=5.0)
    return [*acts, *(_asked(random, 20.0) for _ in range(random.choice([0, 1, 2])))]


def _cut_off(random: Random) -> list[Act]:
    """A primary that hears nothing for long, a standby that is not seen, and commands meanwhile."""
    first = Act(4.0 + random.random(), random.choice(["isolate", "isolate", "stall"]), "a", 15.0)
    acts = [first]
    for _ in range(random.choice([1, 2, 3])):
        after_s = random.choice([4.0, 12.0, 40.0]) * random.random()
        if random.random() < 0.4:
            acts.append(Act(after_s, "cut operator", random.choice("abb"), 60.0))
        else:
            acts.append(_asked(random, after_s))
    return acts


def _back(random: Random) -> list[Act]:
    """A VM that has moved once is protected again, from where it runs now to where it came from."""
    away = Act(5.0, random.choice(["crash", "terminate service", FAILOVER]), "a", 3.0)
    again = Act(random.choice([15.0, 40.0]), PROTECT)
    return [away, again, *_any(random)]


def _off(random: Random) -> list[Act]:
    """The host that took over goes off, and the operator says so; later it is back."""
    first = Act(5.0, random.choice(["isolate", "crash", FAILOVER]), "a", 8.0)
    off = Act(random.uniform(12.0, 30.0), random.choice(["crash", "crash", "isolate"]), "b", 70.0)
    acts = [first, off, Act(4.0, STOP_OFF), Act(random.uniform(15.0, 30.0), START)]
    acts.append(Act(random.choice([2.0, 60.0]), "cut operator", random.choice("aab"), 60.0))
    acts += [_asked(random, 4.0) for _ in range(random.choice([1, 2, 3]))]
    return acts


def _stopped(random: Random) -> list[Act]:
    """The same, after a `stop` that did not see the host from which it was taken over."""
    unseen = random.choice([["crash"], ["crash", "cut operator"], ["isolate", "cut operator"]])
    acts = [Act(0.0, kind, "a", random.uniform(16.0, 24.0)) for kind in unseen]
    acts[0] = acts[0]._replace(after_s=5.0)
    acts.append(Act(random.uniform(10.0, 16.0), random.choice([STOP, STOP, PROTECT])))
    acts.append(
        Act(random.uniform(4.0, 12.0), random.choice(["crash", "crash", "isolate"]), "b", 70.0)
    )
    acts += [Act(4.0, STOP_OFF), Act(random.uniform(15.0, 30.0), START)]
    acts.append(Act(random.choice([8.0, 20.0, 40.0]), "cut operator", random.choice("aab"), 60.0))
    acts += [_asked(random, 20.0) for _ in range(random.choice([1, 2, 3]))]
    return acts


def _operators(random: Random) -> list[Act]:
    """Two operators, while services die and the arbiter does not answer."""
    acts = [Act(4.0 + random.random(), random.choice(["lose arbiter", "stop arbiter"]), "a", 40.0)]
    for _ in range(random.choice([3, 5, 8])):
        after_s = random.choice([0.0, 0.5, 2.0, 12.0]) * random.random()
        kind = random.choice(["kill service", "crash", "destroy", "cut operator", "cut link"])
        acts.append(Act(after_s, kind, random.choice(["primary", "standby"]), 10.0))
        for _ in range(2):
            asked = random.choice([*COMMANDS, STOP, FAILOVER_DEAD])
            acts.append(Act(random.choice([0.0, 0.5, 4.0]) * random.random(), asked, "b"))
    return acts


def _storm(random: Random) -> list[Act]:
    """The arbiter's answers are lost and the clocks part; the primary is asked to end, the operator
    asks for the same thing twice and for the opposite, and a command is paused in it.
    """
    ends = [Act(0.0, random.choice(["terminate service", "shutdown"]), "primary", 20.0)]
    asked = random.choice([FAILOVER, FAILOVER, STOP])
    ends += [Act(0.0, asked), Act(0.0, random.choice([asked, STOP, PROTECT]), random.choice("ab"))]
    ends.append(Act(0.0, random.choice(["freeze command", "kill command"]), "a", 30.0))
    ends += [_fault(random, 0.0) for _ in range(random.choice([0, 1, 1, 2]))]
    random.shuffle(ends)
    acts = [act._replace(after_s=random.choice([0.0, 0.3, 2.5]) * random.random()) for act in ends]
    acts[0] = acts[0]._replace(after_s=4.0 + 3 * random.random())
    return [*acts, *(_asked(random, 12.0) for _ in range(random.choice([0, 1, 2])))]


def _way_back(random: Random) -> list[Act]:
    """A VM that has moved once goes back, and something happens at any moment of that."""
    away = Act(5.0, random.choice(["crash", "shutdown", "terminate service", FAILOVER]), "a", 3.0)
    acts = [away, Act(random.choice([19.0, 40.0]), PROTECT)]
    for _ in range(random.choice([1, 1, 2, 3])):
        after_s = random.choice([0.2, 1.0, 3.0]) * random.random()
        on = random.choice(["primary", "standby", "a", "b"])
        acts.append(Act(after_s, random.choice(ON_THE_WAY), on, random.choice([2.0, 8.0, 30.0])))
    for _ in range(random.choice([1, 2])):
        after_s = random.choice([0.2, 1.0, 3.0]) * random.random()
        acts.insert(random.randint(2, len(acts)), Act(after_s, FAILOVER))
    return [*acts, *(_asked(random, 12.0) for _ in range(random.choice([0, 1, 2])))]


def _three(random: Random) -> list[Act]:
    """A VM that has moved is protected by a third host while the first is away, which is back when
    the second is off, or while its guest moves on.
    """
    how = random.choice(["crash", "crash", "stall", "shutdown", "terminate service", FAILOVER])
    acts = [Act(5.0, how, "a", random.choice([16.0, 25.0, 40.0, 70.0]))]
    if how != "crash" and random.random() < 0.7:  # its home is not seen, and stays
        acts.insert(0, Act(4.0, "cut operator", "a", random.choice([25.0, 40.0, 70.0])))
    acts.append(Act(random.uniform(10.0, 20.0), PROTECT, random.choice("ccca")))
    for _ in range(random.choice([1, 1, 2, 3])):
        kind = random.choice([*ON_THE_WAY, "crash", "kill qemu", FAILOVER, FAILOVER])
        on = random.choice(["primary", "primary", "standby", *"abc"])
        after_s = random.choice([1.0, 3.0, 8.0]) * random.uniform(0.3, 1.0)
        acts.append(Act(after_s, kind, on, random.choice([10.0, 60.0, 120.0])))
    for _ in range(random.choice([1, 2, 3, 4])):
        after_s = random.choice([1.0, 6.0, 20.0]) * random.random()
        kind = random.choice([START, START, STOP, STOP_OFF, FAILOVER, PROTECT])
        acts.append(Act(after_s, kind, random.choice("abc")))
    return acts


def _fault(random: Random, after_s: float) -> Act:
    kinds = random.choice([ON_HOSTS, ON_PROCESSES, ON_PROCESSES, BETWEEN])
    on = random.choice(["primary", "primary", "primary", "standby", "a", "b"])
    for_s = random.choice([1.0, 4.0, 8.0, 20.0]) * random.uniform(0.2, 1.0)
    return Act(after_s, random.choice(kinds), on, for_s)


def _asked(random: Random, after_s: float) -> Act:
    return Act(after_s, random.choice([START, *COMMANDS]), random.choice("ab"))


# How often the arbiter's answer is lost; others: seldom.
_TROUBLE = {_storm: [0.2, 0.4]}
