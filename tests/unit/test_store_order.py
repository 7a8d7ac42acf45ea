"""The order in which checkpoints were taken, and of which VM they are."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vmckpt.store.files.manifest import Manifest
from vmckpt.store.files.order import in_order, of_vm, owners

A, B = "a" * 8, "b" * 8


def made(
    name: str,
    clock: float,
    parent: str | None = None,
    vm_id: str | None = A,
    sequence: int | None = None,
) -> Manifest:
    return Manifest(name, "web", parent, clock, 1, (), (), (), {}, vm_id, sequence)


def order(*manifests: Manifest) -> list[str]:
    return [one.id for one in in_order(manifests)]


def test_clocks_order_what_says_nothing_else() -> None:
    assert order(made("y", 2), made("x", 1), made("z", 3)) == ["x", "y", "z"]


def test_a_parent_comes_first_whatever_clocks_say() -> None:
    assert order(made("child", 1, "parent"), made("parent", 9)) == ["parent", "child"]


def test_numbers_of_one_vm_count_more_than_clocks() -> None:
    numbered = [made("x", 9, sequence=1), made("y", 1, sequence=2), made("z", 5, sequence=3)]
    assert order(*reversed(numbered)) == ["x", "y", "z"]
    assert order(numbered[0], replace(numbered[1], vm_id=B)) == ["y", "x"]


def test_a_ring_of_parents_is_listed_by_the_clock() -> None:
    assert order(made("x", 2, "y"), made("y", 1, "x"), made("z", 9)) == ["z", "y", "x"]


def test_a_chain_longer_than_python_recurses() -> None:
    chain = [made(f"{n:05}", -n, f"{n - 1:05}" if n else None, None) for n in range(5000)]
    newest = made("last", 0, "04999", A)
    assert order(newest, *reversed(chain)) == [*(one.id for one in chain), "last"]
    assert set(owners([*chain, newest]).values()) == {A}


def test_old_ones_are_of_the_vm_that_descends_from_them() -> None:
    old = [made("o1", 1, None, None), made("o2", 2, "o1", None), made("lone", 2, None, None)]
    found = owners([*old, made("n", 3, "o2")])
    assert found == {"o1": A, "o2": A, "lone": None, "n": A}


def test_a_vm_has_its_old_ones_before_it_has_taken_a_new_one() -> None:
    old = [made("o1", 1, None, None), made("o2", 2, "o1", None), made("lone", 2, None, None)]
    assert [one.id for one in of_vm(old, "web", A, "o2")] == ["o1", "o2"]
    assert of_vm(old, "web", None, None) == old


def test_old_ones_of_another_name_or_of_two_vms_are_of_none_that_is_known() -> None:
    old = made("old", 1, None, None)
    assert owners([old, replace(made("copy", 2, "old"), vm="web-2")])["old"] is None
    assert owners([old, made("x", 2, "old"), made("y", 2, "old", B)])["old"] is None


@given(
    st.lists(
        st.tuples(st.floats(-9, 9), st.none() | st.integers(0, 9), st.none() | st.integers(0, 5)),
        max_size=10,
    )
)
def test_every_manifest_is_listed_once(
    given_: list[tuple[float, int | None, int | None]],
) -> None:
    """Also where parents run in rings, and against the numbers."""
    manifests = [
        made(str(n), clock, None if parent is None else str(parent), sequence=sequence)
        for n, (clock, parent, sequence) in enumerate(given_)
    ]
    assert sorted(order(*manifests)) == sorted(one.id for one in manifests)
