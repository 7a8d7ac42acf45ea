"""A copy of an adopted machine: what tells it from the original, and what only one can have. Pure.

Its directory, sockets, taps, memory and images are each QEMU's own anyway (holes.py).
"""

import re
import uuid
from collections.abc import Iterator, Sequence

from vmckpt.vm.adopted.arguments import options, values
from vmckpt.vm.adopted.settings import Settings

_NETWORKS = ("netdev", "nic", "net")
_FORWARDS = "hostfwd"
# In -set GROUP.ID.KEY=VALUE.
_ADDRESS = re.compile(r"\.mac(addr)?=")


def with_uuid(arguments: Sequence[str], new: str) -> list[str]:
    """The arguments with another UUID of the machine, wherever they name one."""
    given = list(arguments)
    for name, at in options(arguments):
        if name == "uuid":
            given[at] = new
    for at, _, value in values(arguments, "smbios"):
        if value.get("uuid") is not None:
            given[at] = str(value.put("uuid", new))
    return given


def with_new_generation(arguments: Sequence[str]) -> list[str]:
    """The arguments with another VM generation ID, which tells the guest that time went back."""
    given = list(arguments)
    for at, _, value in values(arguments, "device"):
        if value.get("driver") == "vmgenid":
            given[at] = str(value.put("guid", str(uuid.uuid4())))
    return given


def without_forwards(arguments: Sequence[str]) -> list[str]:
    """The arguments without ports of the host's that lead to the guest."""
    given = list(arguments)
    for at, _, value in values(arguments, *_NETWORKS):
        if _forwards(value):
            given[at] = str(value.without(_FORWARDS))
    return given


def undoubled(arguments: Sequence[str], *, plugged: bool) -> Iterator[str]:
    """What a copy cannot have besides the original, in words."""
    for at, name, value in values(arguments, *_NETWORKS, "device"):
        option = f"'-{name} {arguments[at]}'"
        if name != "device":
            if plugged and _forwards(value):
                yield f"{option} listens on ports of the host, which the original has"
        elif (cid := value.get("guest-cid")) is not None:
            yield f"{option} has the context ID {cid} on its host, which the original has"
    for name, at in options(arguments):
        if name == "set" and _ADDRESS.search(arguments[at]):  # it counts, whatever -device says
            yield f"'-set {arguments[at]}' gives it the address of the original"


def _forwards(value: Settings) -> list[str]:
    return value.all(_FORWARDS)
