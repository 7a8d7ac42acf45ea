"""What a QEMU can do, and what a pair of QEMUs can do together."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.replies import QemuVersion
from vmckpt.qemu.shapes import SchemaInfo


class Abilities(NamedTuple):
    """What one QEMU binary reports that it supports. Applies to the binary, not to one VM.

    `machines` maps every machine name to itself and every alias to its name; `compressions` are the
    values that multifd-compression accepts, `parameters` the migration parameters.
    """

    version: QemuVersion
    machines: Mapping[str, str]
    cpu_models: frozenset[str]
    capabilities: frozenset[str]
    compressions: frozenset[str]
    parameters: frozenset[str]
    commands: frozenset[str]


async def learn(monitor: Monitor) -> Abilities:
    """Ask a QEMU (any machine, even stopped) what it supports. About 60 ms."""
    schema = {item["name"]: item for item in await commands.query_qmp_schema(monitor)}
    try:
        compressions = _enum_values(schema, "migrate-set-parameters", "multifd-compression")
        parameters = frozenset(_arguments(schema, "migrate-set-parameters"))
    except KeyError as exc:
        raise monitor.malformed("query-qmp-schema", f"it has no {exc}") from exc
    machines = {}
    for machine in await commands.query_machines(monitor):
        machines[machine.name] = machine.name
        if machine.alias:
            machines[machine.alias] = machine.name
    return Abilities(
        version=await commands.query_version(monitor),
        machines=machines,
        cpu_models=frozenset(await commands.query_cpu_models(monitor)),
        capabilities=frozenset(await commands.query_migrate_capabilities(monitor)),
        compressions=compressions,
        parameters=parameters,
        commands=frozenset(name for name, item in schema.items() if item["meta-type"] == "command"),
    )


def _arguments(schema: Mapping[str, SchemaInfo], command: str) -> dict[str, str]:
    return {
        member["name"]: member["type"] for member in schema[schema[command]["arg-type"]]["members"]
    }


def _enum_values(schema: Mapping[str, SchemaInfo], command: str, argument: str) -> frozenset[str]:
    type_name = _arguments(schema, command).get(argument)
    return frozenset(schema[type_name]["values"]) if type_name else frozenset()


class WantedSettings(NamedTuple):
    """The settings that a migration requests from the pair. None and False request nothing.

    `throttle_at_will`: the guest is slowed on request, see `throttle`; auto-converge first slows it
    by `throttle_initial_percent`, then by `throttle_increment_percent` more each time, up to
    `most_throttle_percent`; None: QEMU's defaults.
    """

    postcopy: bool = False
    auto_converge: bool = False
    throttle_at_will: bool = False
    most_throttle_percent: int | None = None
    throttle_initial_percent: int | None = None
    throttle_increment_percent: int | None = None
    channels: int | None = None
    compression: str | None = None
    compression_level: int | None = None
    xbzrle_cache_bytes: int | None = None
    zero_copy: bool = False
    max_downtime_ms: int = 300
    max_bandwidth_bytes_per_s: int = 0
    postcopy_bandwidth_bytes_per_s: int = 0
    pause_before_switchover: bool = False
    hold_switchover: bool = False


class Refusal(NamedTuple):
    """A requested setting that this pair does not support; `option`: its flag."""

    option: str
    reason: str


class Agreement(NamedTuple):
    """Complete settings for both sides: what was not requested is switched off."""

    capabilities: Mapping[str, bool]
    source_parameters: Mapping[str, Any]
    target_parameters: Mapping[str, Any]


# The bandwidth limit for memory and devices, in bytes/s; 0: no limit. QEMU's default.
SENDING_SPEED, USUAL_SPEED = "max-bandwidth", 128 << 20
# The speed that QEMU assumes at the switchover, in bytes/s; 0: it measures (QEMU >= 8.2).
SWITCHOVER_SPEED = "avail-switchover-bandwidth"
# How to find zero pages, if multifd's channels can do it (QEMU >= 9.0).
ZERO_PAGES = "zero-page-detection"
# With a limit this low, no rest is small enough to stop the guest for.
HELD_BYTES_PER_S = 1000

# Auto-converge's defaults in QEMU, and the lowest limit that it accepts.
THROTTLE: Mapping[str, int] = {
    "cpu-throttle-initial": 20,
    "cpu-throttle-increment": 10,
    "max-cpu-throttle": 99,
    "throttle-trigger-threshold": 50,
}
LEAST_THROTTLE = 1


def auto_converge(settings: WantedSettings) -> dict[str, int]:
    """Parameters that limit QEMU's throttling to the requested share."""
    reply = {
        "cpu-throttle-initial": settings.throttle_initial_percent,
        "cpu-throttle-increment": settings.throttle_increment_percent,
        "max-cpu-throttle": settings.most_throttle_percent,
    }
    known = {**THROTTLE, **{name: value for name, value in reply.items() if value is not None}}
    most = min(max(known["max-cpu-throttle"], LEAST_THROTTLE), THROTTLE["max-cpu-throttle"])
    first = min(known["cpu-throttle-initial"], most)
    return {**known, "max-cpu-throttle": most, "cpu-throttle-initial": first}


def throttle(percent: int) -> dict[str, int]:
    """Parameters with which auto-converge soon takes exactly that share of the processors.

    QEMU raises the throttle by itself when, for the second time, more than a part of what it sent
    in a second or more was dirtied meanwhile: here any part suffices, and one step reaches the
    maximum.
    """
    return {
        "cpu-throttle-initial": percent,
        "cpu-throttle-increment": percent,
        "max-cpu-throttle": percent,
        "throttle-trigger-threshold": 1,
    }


# The one compression that needs no channels: for pages sent before, only the difference is sent.
XBZRLE = "xbzrle"
ZERO_COPY = "zero-copy-send"
# QEMU's defaults, set explicitly: an earlier migration of the same QEMU may have left others.
XBZRLE_CACHE_BYTES = 64 << 20
LEVEL = 1

# It omits memory; saving devices alone sets it, and may have died before resetting it.
_NEVER = ("x-ignore-shared",)
# Always on if both sides have them: without return-path a destination that fails to load leaves the
# source "completed" and the guest lost; events wake the monitor loop.
_ALWAYS = ("return-path", "events")


def agree(
    source: Abilities, destination: Abilities, settings: WantedSettings
) -> Agreement | list[Refusal]:
    """Settings for the request, or every reason why this pair does not support it. Pure."""
    both = source.capabilities & destination.capabilities
    wanted = _wanted(settings)
    if refusals := list(_refusals(source, destination, settings, wanted)):
        return refusals
    capabilities = dict.fromkeys(_ALWAYS, True)
    capabilities |= {name: on for name, (_, on) in wanted.items() if name in both}
    capabilities |= {name: False for name in _NEVER if name in both}
    # With post-copy: urgent pages on a separate channel, and the destination counts its stalls.
    capabilities |= {
        name: settings.postcopy
        for name in ("postcopy-preempt", "postcopy-blocktime")
        if name in both
    }
    channels: dict[str, Any] = {}
    if settings.channels is not None:
        channels["multifd-channels"] = settings.channels
        channels["multifd-compression"] = settings.compression or "none"
    return Agreement(
        capabilities=capabilities,
        source_parameters=channels | _source_parameters(source, settings),
        target_parameters=channels,
    )


def _wanted(settings: WantedSettings) -> dict[str, tuple[str, bool]]:
    """Each capability that can be requested: its option, and whether it was requested."""
    return {
        "postcopy-ram": ("--method postcopy", settings.postcopy),
        "multifd": (
            "--parallel" if settings.compression in (None, XBZRLE) else "--compress",
            settings.channels is not None,
        ),
        "xbzrle": ("--compress", settings.compression == XBZRLE),
        ZERO_COPY: ("--zerocopy", settings.zero_copy),
        "auto-converge": (
            "--auto-converge" if settings.auto_converge else "--policy",
            settings.auto_converge or settings.throttle_at_will,
        ),
        "pause-before-switchover": ("--disks copy", settings.pause_before_switchover),
    }


def _refusals(
    source: Abilities,
    destination: Abilities,
    settings: WantedSettings,
    wanted: Mapping[str, tuple[str, bool]],
) -> Iterator[Refusal]:
    needed = {capability: option for capability, (option, on) in wanted.items() if on}
    for capability, option in (needed | dict.fromkeys(_ALWAYS, "migrate")).items():
        if capability not in source.capabilities & destination.capabilities:
            who = _who_lacks(source, destination, capability)
            yield Refusal(option, f"{who} lacks migration capability '{capability}'")
    if settings.postcopy and settings.channels is not None:
        reason = "QEMU cannot combine post-copy with parallel channels (multifd)"
        yield Refusal(wanted["multifd"][0], reason)
    if settings.compression == XBZRLE:
        if settings.channels is not None:
            yield Refusal(
                "--parallel", "QEMU cannot combine xbzrle with parallel channels (multifd)"
            )
    elif (
        settings.compression
        and settings.compression not in source.compressions & destination.compressions
    ):
        yield Refusal("--compress", f"no '{settings.compression}' compression in both QEMUs")
    if settings.zero_copy and settings.compression:
        yield Refusal("--zerocopy", "a compressed page is a copy already")
    elif settings.zero_copy and settings.channels is None:
        yield Refusal("--zerocopy", "QEMU sends without copying over parallel channels alone")
    if settings.postcopy_bandwidth_bytes_per_s and not settings.postcopy:
        yield Refusal("--postcopy-bandwidth", "nothing here uses post-copy")


def _source_parameters(source: Abilities, settings: WantedSettings) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "downtime-limit": settings.max_downtime_ms,
        SENDING_SPEED: settings.max_bandwidth_bytes_per_s,
    }
    if settings.postcopy:
        parameters["max-postcopy-bandwidth"] = settings.postcopy_bandwidth_bytes_per_s
    if settings.compression == XBZRLE:
        parameters["xbzrle-cache-size"] = settings.xbzrle_cache_bytes or XBZRLE_CACHE_BYTES
    elif settings.compression:
        level = LEVEL if settings.compression_level is None else settings.compression_level
        parameters[f"multifd-{settings.compression}-level"] = level
    if settings.auto_converge:
        parameters |= auto_converge(settings)
    elif settings.throttle_at_will:
        parameters |= throttle(LEAST_THROTTLE)
    if SWITCHOVER_SPEED in source.parameters:
        parameters[SWITCHOVER_SPEED] = HELD_BYTES_PER_S if settings.hold_switchover else 0
    return parameters


def splits_well(source: Abilities, destination: Abilities) -> bool:
    """Whether memory is best sent over several channels, unless something else was requested.

    Since QEMU 9.0 each channel finds zero pages by itself; before, one thread did it for all of
    them, and a channel that could not be created took the source down with it.
    """
    return (
        "multifd" in source.capabilities & destination.capabilities
        and ZERO_PAGES in source.parameters & destination.parameters
    )


def _who_lacks(source: Abilities, destination: Abilities, capability: str) -> str:
    lacking = [
        f"the {side}'s QEMU {abilities.version}"
        for side, abilities in (("source", source), ("destination", destination))
        if capability not in abilities.capabilities
    ]
    return " and ".join(lacking)
