"""How long saving device state to guest memory and loading it takes, from past moves. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from vmckpt.forecast.model.forecast import Band, Forecast
from vmckpt.forecast.model.guest import PAGE_BYTES, Guest

# Less than this does not show the throughput: it is the time of the hooks and drivers themselves.
TELLING_BYTES = 64 << 20


class DeviceMove(NamedTuple):
    """A past move: bytes saved, seconds to save them and to load them."""

    device_bytes: int
    out_s: float
    back_s: float


class DevicePhases(NamedTuple):
    """The forecast for a guest's devices; the two times are None if no move was seen."""

    device_bytes: int
    moves: int
    out_s: Band | None
    back_s: Band | None

    @property
    def both_s(self) -> Band | None:
        """Saving and loading together."""
        if self.out_s is None or self.back_s is None:
            return None
        return Band(*(out + back for out, back in zip(self.out_s, self.back_s, strict=True)))


def device_phases(device_bytes: int, seen: Sequence[DeviceMove]) -> DevicePhases:
    """Forecast for that many bytes: the past time, and for more bytes than then, in proportion.

    Fewer bytes take as long as then: copying and fixed costs cannot be distinguished.
    """
    if not seen:
        return DevicePhases(device_bytes, 0, None, None)
    out = sorted(_scaled(device_bytes, one.device_bytes, one.out_s) for one in seen)
    back = sorted(_scaled(device_bytes, one.device_bytes, one.back_s) for one in seen)
    return DevicePhases(device_bytes, len(seen), _band(out), _band(back))


def _scaled(device_bytes: int, then_bytes: int, took_s: float) -> float:
    if then_bytes < TELLING_BYTES:
        return took_s
    return took_s * max(1.0, device_bytes / then_bytes)


def _band(values: Sequence[float]) -> Band:
    last = len(values) - 1
    return Band(*(values[round(part * last)] for part in (0.1, 0.5, 0.9)))


def with_devices(forecast: Forecast, phases: DevicePhases) -> Forecast:
    """The same method with the phases of the guest's devices, which come before and after it."""
    if phases.both_s is None:
        return forecast
    total = zip(forecast.total_s, phases.both_s, strict=True)
    return replace(forecast, total_s=Band(*(mode_s + device_s for mode_s, device_s in total)))


def with_device_memory(guest: Guest, device_bytes: int) -> Guest:
    """The guest with its devices' state in memory: at worst in pages that were zero.

    Their location in memory is unknown.
    """
    if not device_bytes:
        return guest
    share = device_bytes / PAGE_BYTES / guest.total_pages
    before = 1 - guest.zero_share
    after = min(1.0, before + share)
    ratio = (guest.ratio * before + (after - before)) / after
    return replace(guest, zero_share=1 - after, ratio=ratio, layout=())
