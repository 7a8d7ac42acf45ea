"""A migration that takes longer than was promised says so, whatever it is doing then."""

import asyncio

import pytest

from tests import virtual_time
from vmckpt.events.types import Event, Note
from vmckpt.migrate.recorded import recorded
from vmckpt.options.migration import MigrationOptions

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("promised_s", "takes_s", "told"), [(600.0, 599.0, 0), (600.0, 86_400.0, 1), (None, 601.0, 0)]
)
def test_a_promise_that_is_broken_is_told_once(
    promised_s: float | None, takes_s: float, told: int
) -> None:
    events: list[Event] = []
    options = MigrationOptions(finish_within_s=promised_s)

    async def move() -> None:
        async with recorded({"vm": "web"}, options, events.append):
            await asyncio.sleep(takes_s)  # in any step
        seen = len(events)
        await asyncio.sleep(1000.0)
        assert len(events) == seen

    virtual_time.run(move())
    late = [event for event in events if isinstance(event, Note)]
    text = "not done within 10m00s, contrary to the forecast: it continues"
    assert [(one.code, one.text) for one in late] == [("late", text)] * told
