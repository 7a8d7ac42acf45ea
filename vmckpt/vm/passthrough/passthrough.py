"""Passed-through devices as a spec describes them, and their ports."""

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from vmckpt.errors import UsageError
from vmckpt.vm.spec.toml_table import TomlTable

if TYPE_CHECKING:
    from vmckpt.hosts.ssh.address import Address

VFIO = "vfio-pci"
MDEV = "mdev:"
_MATCH = re.compile(r"[0-9a-f]{4}:[0-9a-f]{4}|mdev:[A-Za-z0-9_.-]+")
_ID = re.compile(r"[a-z][a-z0-9_]{0,30}")
PHASES = ("preflight", "quiesce", "lock", "checkpoint", "release",
          "reattach", "restore", "resume", "abort")  # fmt: skip
MIB = 1 << 20


class Strategy(StrEnum):
    """How a device's guest moves.

    hook-detach: a hook in the guest saves the device's content to memory; the device is unplugged,
    and an equivalent plugged in at the destination. stop-app: the same, but the hook stops the
    application and starts it again. vfio-migration: QEMU moves the device's state. failover: a
    virtio NIC of the guest replaces it meanwhile; QEMU unplugs it, and plugs in the destination's.
    """

    HOOK_DETACH = "hook-detach"
    STOP_APP = "stop-app"
    VFIO_MIGRATION = "vfio-migration"
    FAILOVER = "failover"

    @property
    def detaches(self) -> bool:
        """Whether vmckpt unplugs the device for the move, with its hook."""
        return self in (Strategy.HOOK_DETACH, Strategy.STOP_APP)


class Passthrough(NamedTuple):
    """One device with all its functions, behind its own port.

    A host's devices whose vendor and device id, or type of mediated device, are `match` are its
    equivalents; None: QEMU creates it, from `options` alone. `hook` is a program in the guest.
    `memory_bytes` is the most that the device holds. `limits_s` has time limits of phases that
    differ from the defaults. `nic` is the number of the virtio NIC that replaces it meanwhile.
    `ssh` is the address of the guest's sshd, through which the hook runs if the guest agent does
    not run it.
    """

    id: str
    driver: str
    match: str | None
    strategy: Strategy
    hook: str | None
    memory_bytes: int
    limits_s: dict[str, int]
    options: dict[str, Any]
    nic: int | None = None
    ssh: "Address | None" = None

    @property
    def netdev(self) -> str | None:
        """The back end, on the host's bridge, of a NIC that QEMU creates; else None."""
        is_made = self.strategy is Strategy.FAILOVER and self.match is None
        return f"{self.id}-net" if is_made else None

    @property
    def port(self) -> str:
        """The id of its port."""
        return f"{self.id}-port"

    def function_id(self, number: int) -> str:
        """The id of its function `number`; function 0 has the device's own id."""
        return self.id if number == 0 else f"{self.id}-{number}"


def read_passthrough(table: TomlTable) -> Passthrough:
    """One `[[passthrough]]`. Raises UsageError with the line and the key."""
    name = table.text("id")
    if not _ID.fullmatch(name):
        remedy = 'write e.g. id = "gpu0"'
        raise table.wrong("id", "it is lower-case letters, digits and _, at most 31", remedy)
    driver = table.text("driver", VFIO)
    match = table.text("match") if table.has("match") else None
    if match is not None and not match.startswith(MDEV):
        match = match.lower()
    if match is not None and not _MATCH.fullmatch(match):
        why = "it is VENDOR:DEVICE, four hex digits each, or mdev:TYPE"
        raise table.wrong("match", why, 'as `vmckpt device cards` shows it, e.g. "10de:2330"')
    if (match is None) == (driver == VFIO):
        why = f"{driver} {'needs one' if driver == VFIO else 'is made by QEMU and has none'}"
        remedy = f'write match = "VENDOR:DEVICE" for {VFIO}, and for nothing else'
        raise table.wrong("match", why, remedy)
    hook = table.text("hook") if table.has("hook") else None
    strategies = [strategy.value for strategy in Strategy]
    usual = Strategy.HOOK_DETACH if hook else Strategy.VFIO_MIGRATION
    strategy = Strategy(table.choice("strategy", tuple(strategies), usual.value))
    if strategy.detaches and hook is None:
        remedy = 'name the program in the guest that saves its state: hook = "/path"'
        raise table.wrong("hook", f"{strategy} needs one", remedy)
    if hook is not None and not hook.startswith("/"):
        raise table.wrong("hook", "it is a path in the guest", "begin it with /")
    nic = table.optional_integer("nic")
    if (nic is None) == (strategy is Strategy.FAILOVER):
        why = "a failover pair has one, no other strategy does"
        raise table.wrong("nic", why, "name the virtio NIC that stands in: nic = 0 is the first")
    found = Passthrough(
        name,
        driver,
        match,
        strategy,
        hook,
        table.size("memory") if table.has("memory") else 0,
        _limits(table),
        table.free("options"),
        nic,
        _ssh(table),
    )
    table.no_more_keys()
    return found


def _ssh(table: TomlTable) -> "Address | None":
    if not table.has("ssh"):
        return None
    if not table.has("hook"):
        raise table.wrong("ssh", "it is for running a hook, and there is none", "leave it out")
    from vmckpt.hosts.ssh.address import Address

    try:
        return Address.parse(table.text("ssh"))
    except UsageError as exc:
        raise table.wrong("ssh", exc.why, "write e.g. ssh://root@192.0.2.30") from exc


def _limits(table: TomlTable) -> dict[str, int]:
    limits = table.free("limits_s")
    for name, value in limits.items():
        if name not in PHASES:
            raise table.wrong(
                "limits_s", f"'{name}' is not a phase", f"they are: {', '.join(PHASES)}"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise table.wrong("limits_s", f"{name} is not a whole number of seconds", "fix it")
    return limits


def port_arguments(devices: Sequence[Passthrough], first_slot: int) -> list[str]:
    """QEMU's arguments for the ports that the devices are plugged into. Pure."""
    argv = []
    for number, device in enumerate(devices):
        port: dict[str, Any] = {
            "driver": "pcie-root-port",
            "id": device.port,
            "bus": "pcie.0",
            "chassis": number + 1,
            "addr": hex(first_slot + number),
        }
        if device.driver == VFIO and device.memory_bytes:
            # Firmware reserves this much behind the port for a device plugged in later: twice the
            # device's memory, because its other windows need some too.
            room = 1 << (2 * device.memory_bytes - 1).bit_length()
            port["pref64-reserve"] = max(room, 2 * MIB)
        argv += ["-device", json.dumps(port, separators=(",", ":"))]
    return argv
