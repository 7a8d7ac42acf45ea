"""A guest is powered off by its button, or the wait for it has an end."""

import asyncio

import pytest

from vmckpt.errors import TimedOutError
from vmckpt.vm.power_off import power_off

pytestmark = pytest.mark.contract


class Guest:
    """Ends when it is asked after for the second time, if it heeds its button at all."""

    def __init__(self, *, heeds: bool) -> None:
        self.heeds, self.presses, self.questions = heeds, 0, 0

    async def press(self) -> None:
        self.presses += 1

    async def is_alive(self) -> bool:
        self.questions += 1
        return not (self.heeds and self.presses and self.questions > 1)


def test_the_button_is_pressed_once_and_the_end_awaited() -> None:
    guest = Guest(heeds=True)
    asyncio.run(power_off("web", guest.press, guest.is_alive, 10))
    assert (guest.presses, guest.questions) == (1, 2)


def test_a_guest_that_does_not_heed_it_goes_on() -> None:
    guest = Guest(heeds=False)
    with pytest.raises(TimedOutError, match="'web' did not power off"):
        asyncio.run(power_off("web", guest.press, guest.is_alive, 0.01))
    assert guest.presses == 1
