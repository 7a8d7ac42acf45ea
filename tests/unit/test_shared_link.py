"""How migrations share a link: the arithmetic, and who is seen to be there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.migrate.shared_link import fair_share

limits = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("mine", "others", "share"),
    [
        (60, [], 60),
        (60, [60], 30),
        (60, [60, 60], 20),
        (100, [40], 60),
        (40, [100], 40),
        (100, [10, 100], 45),
        (1, [1, 1], 1),
    ],
)
@pytest.mark.unit
def test_a_link_is_divided_evenly_and_nothing_is_left_lying(
    mine: int, others: list[int], share: int
) -> None:
    assert fair_share(mine, others) == share


@given(limits)
@pytest.mark.unit
def test_all_together_get_the_largest_limit_and_nobody_more_than_it_asked_for(
    asked: list[int],
) -> None:
    shares = [
        fair_share(one, [*asked[:number], *asked[number + 1 :]]) for number, one in enumerate(asked)
    ]
    assert all(1 <= share <= one for share, one in zip(shares, asked, strict=True))
    count = len(asked)
    assert max(asked) - count <= sum(shares) <= max(asked) + count
