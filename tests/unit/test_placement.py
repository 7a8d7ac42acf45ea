"""Where VMs go: no limit is ever broken, and every VM is placed or named."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.forecast.drain.fleet import HostRoom, MoveCost, Mover
from vmckpt.forecast.drain.placement import DrainPlacement, place
from vmckpt.units import GIB

pytestmark = pytest.mark.unit

WORDS = ("a", "b", "c")
HOSTS = ("h1", "h2", "h3", "h4")
words = st.frozensets(st.sampled_from(WORDS), max_size=2)
costs = st.builds(
    MoveCost, st.floats(0, 3), st.floats(0, 60), st.floats(0, 3), spread_s=st.floats(0, 5)
)


@st.composite
def fleets(draw: st.DrawFn, most: int = 7) -> tuple[list[Mover], list[HostRoom]]:
    names = draw(st.lists(st.sampled_from(HOSTS), unique=True, max_size=4))
    rooms = [
        HostRoom(name, draw(st.integers(0, 12)) * GIB, draw(st.integers(0, 12)),
             draw(st.integers(0, 5)), draw(words), draw(words))
        for name in names
    ]  # fmt: skip
    movers = [
        Mover(
            f"vm{number}",
            draw(st.sampled_from(("s1", "s2"))),
            draw(st.integers(1, 6)) * GIB,
            draw(st.integers(1, 4)),
            {name: draw(costs) for name in names if draw(st.integers(0, 3))},
            draw(words),
            draw(st.one_of(st.just(frozenset[str]()), words)),
        )
        for number in range(draw(st.integers(0, most)))
    ]
    return movers, rooms


def broken(
    movers: Sequence[Mover], rooms: Sequence[HostRoom], where: Mapping[str, str]
) -> list[str]:
    """Every limit that a placement breaks."""
    found = []
    for room in rooms:
        there = [one for one in movers if where.get(one.name) == room.name]
        asked = Counter(word for one in there for word in one.apart)
        if sum(one.memory_bytes for one in there) > room.memory_bytes:
            found.append(f"{room.name}: memory")
        if sum(one.vcpus for one in there) > room.vcpus or len(there) > room.vms:
            found.append(f"{room.name}: vcpus or vms")
        if any(room.name not in one.costs for one in there):
            found.append(f"{room.name}: closed")
        if any(count > 1 or word in room.apart for word, count in asked.items()):
            found.append(f"{room.name}: apart")
    for word in WORDS:
        mates = {where.get(one.name, "-") for one in movers if word in one.together}
        homes = {room.name for room in rooms if word in room.together}
        if len(mates) > 1 or (homes and not mates <= {*homes, "-"}):
            found.append(f"{word}: together")
    return found


def where(placed: DrainPlacement) -> dict[str, str]:
    return {move.vm: move.destination for move in placed.moves}


@settings(max_examples=30)
@given(fleets())
def test_no_limit_is_broken_and_every_vm_is_placed_or_named(
    fleet: tuple[list[Mover], list[HostRoom]],
) -> None:
    movers, rooms = fleet
    placed = place(movers, rooms)
    assert broken(movers, rooms, where(placed)) == []
    assert sorted([*where(placed), *placed.stay]) == sorted(one.name for one in movers)
    assert all(reason for reason in placed.stay.values())
    sources = {one.name: one.source for one in movers}
    assert all(move.source == sources[move.vm] for move in placed.moves)


@settings(max_examples=30)
@given(fleets(most=4))
def test_few_vms_have_a_place_wherever_there_is_one_for_all(
    fleet: tuple[list[Mover], list[HostRoom]],
) -> None:
    movers, rooms = fleet
    placed = place(movers, rooms)
    if not placed.stay:
        return
    names = [room.name for room in rooms]
    for choice in product(names, repeat=len(movers)):
        tried = dict(zip((one.name for one in movers), choice, strict=True))
        assert broken(movers, rooms, tried)


NONE = frozenset[str]()


def mover(
    name: str,
    gib: int,
    to: Sequence[str] = HOSTS,
    *,
    apart: frozenset[str] = NONE,
    together: frozenset[str] = NONE,
) -> Mover:
    costs = {host: MoveCost(1.0, gib, 0.5) for host in to}
    return Mover(name, "s", gib * GIB, 1, costs, apart, together)


def room(name: str, gib: int, **more: frozenset[str]) -> HostRoom:
    return HostRoom(name, gib * GIB, 64, 64, **more)


def test_alike_hosts_are_filled_alike() -> None:
    placed = place([mover(f"vm{n}", 2) for n in range(8)], [room(host, 32) for host in HOSTS])
    assert Counter(where(placed).values()) == dict.fromkeys(HOSTS, 2)


def test_the_faster_way_is_taken_while_there_is_room() -> None:
    fast_and_slow = {"h1": MoveCost(1.0, 5.0, 0.5), "h2": MoveCost(1.0, 10.0, 0.5)}
    movers = [Mover(f"vm{n}", "s", 4 * GIB, 1, fast_and_slow) for n in range(3)]
    placed = place(movers, [room("h1", 8), room("h2", 64)])
    assert Counter(where(placed).values()) == {"h1": 2, "h2": 1}


def test_one_gives_way_where_it_may_go_elsewhere() -> None:
    # The small one alone may go to h2; spread out or packed, the large one needs all of h1.
    movers = [mover("small", 2, ("h1", "h2")), mover("large", 8, ("h1",))]
    assert where(place(movers, [room("h1", 8), room("h2", 4)])) == {"small": "h2", "large": "h1"}


def test_who_belongs_together_goes_together_and_to_those_who_stay() -> None:
    shop = frozenset({"shop"})
    movers = [mover("web", 2, together=shop), mover("db", 4, together=shop)]
    rooms = [room("h1", 8), room("h2", 6, together=shop), room("h3", 64)]
    assert where(place(movers, rooms)) == {"web": "h2", "db": "h2"}
    (first, second) = place(movers, [room("h2", 5, together=shop), rooms[2]]).stay.values()
    assert "h2: 5.00 GiB free, 6.00 GiB needed" in first
    assert "h3: those it must be with are on h2" in second
    assert "with web, db" in first


def test_a_vm_that_has_to_be_with_vms_of_two_hosts_stays() -> None:
    """It went to one of the two."""
    both = mover("web", 1, together=frozenset({"shop", "mail"}))
    rooms = [
        room("h1", 8, together=frozenset({"shop"})),
        room("h2", 8, together=frozenset({"mail"})),
    ]
    (reason,) = place([both], rooms).stay.values()
    assert "h1: those it must be with are on h2" in reason


def test_replicas_go_to_different_hosts_and_the_one_too_many_says_why() -> None:
    replicas = [mover(f"r{n}", 1, apart=frozenset({"web"})) for n in range(3)]
    placed = place(
        replicas, [room("h1", 8), room("h2", 8), room("h3", 8, apart=frozenset({"web"}))]
    )
    assert sorted(where(placed).values()) == ["h1", "h2"]
    (why,) = placed.stay.values()
    assert why == "h1, h2, h3: a VM is there that it must be apart from (web)"


def test_what_cannot_be_is_said() -> None:
    x, y = frozenset({"x"}), frozenset({"y"})
    pair = [mover(name, 1, apart=x, together=y) for name in "ab"]
    placed = place(pair, [room("h1", 8)])
    assert set(placed.stay) == {"a", "b"}
    assert "apart from a VM (x)" in placed.stay["a"]
    assert place([mover("a", 1)], []).stay == {"a": "there is no host that it may go to"}
    closed = Mover("a", "s", GIB, 1, {}, closed={"h1": "[cpu-model] no such CPU"})
    assert place([closed], [room("h1", 8)]).stay == {"a": "h1: [cpu-model] no such CPU"}
