"""Rewrite a running QEMU's command line for a destination, without a change to the guest. Pure.

Kept: all that the guest sees, in order, with QEMU's own choices written out. Replaced: what belongs
to the process, such as sockets, taps, logs and monitors. Anything else is refused by name.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.units import MIB
from vmckpt.vm.adopted import devices, holes, host_ends, images
from vmckpt.vm.adopted.draft import Draft
from vmckpt.vm.adopted.facts import AdoptedFacts
from vmckpt.vm.adopted.images import AdoptedDisk
from vmckpt.vm.adopted.memory import has_own_memory, layout
from vmckpt.vm.adopted.options import Option, OptionFate, fate, split_options
from vmckpt.vm.adopted.settings import Settings, parse_settings

AGENT_PORT = "org.qemu.guest_agent.0"
_PORTS = ("serial", "parallel", "debugcon")
_CONSOLES = ("isa-serial", "pci-serial", "virtconsole")


class Rewritten(NamedTuple):
    """A destination's command line. `notes` tell the operator what differs there.

    `files` must be readable there, TCP ports `forwards` free. `console` is the present socket of
    the first serial port, if any; `ram_dir`: where its memory goes.
    """

    arguments: tuple[str, ...]
    disks: tuple[AdoptedDisk, ...]
    nics: tuple[str, ...]
    guest_agent: bool
    files: tuple[Path, ...]
    forwards: tuple[int, ...]
    notes: tuple[str, ...]
    console: Path | None
    ram_dir: Path


def rewrite(name: str, facts: AdoptedFacts) -> Rewritten:
    """Raises RefusedError naming everything that cannot be carried over."""
    options = list(split_options(facts.argv[1:]))
    draft = _begin(options, facts)
    for option in options:
        _carry(draft, option)
    host_ends.default_console(draft)
    host_ends.default_network(draft, options)
    _write_out(draft, options)
    _require_used(draft, options)
    disks = images.settle_images(draft)
    nodes = {
        one.owner: disk.node
        for disk in disks
        for one in facts.drives
        if one.node == disk.node_now and one.owner
    }
    devices.plugged_devices(draft, nodes)
    if draft.refusals:
        raise RefusedError(
            f"this QEMU cannot become the VM '{name}'",
            why="; ".join(f"{what}: {why}" for what, why in draft.refusals),
            remedy="unplug or leave out what is named (its guest keeps running), or move the VM "
            "in another way",
        )
    return Rewritten(
        tuple(draft.arguments),
        disks,
        tuple(draft.nics),
        draft.agent is not None,
        tuple(draft.files),
        tuple(draft.forwards),
        tuple(draft.notes),
        _console_now(draft, options),
        draft.memory.ram_dir,
    )


def _begin(options: Sequence[Option], facts: AdoptedFacts) -> Draft:
    """A draft that knows the users of each character device, and the unplugged devices."""
    given = [_settings(option, "driver") for option in options if option.name == "device"]
    users = [one.get("chardev") for one in given]
    ports = [option for option in options if option.name in _PORTS]
    users += [(option.value or "").removeprefix("chardev:") for option in ports]
    draft = Draft(facts, Counter(user for user in users if user))
    draft.has_own_memory, draft.memory = has_own_memory(options), layout(options, facts)
    draft.agent = next((one.get("chardev") for one in given if one.get("name") == AGENT_PORT), None)
    serials = [option.value or "" for option in options if option.name == "serial"]
    if serials:
        first = serials[0]
        is_named = first.startswith("chardev:")
        draft.console = first.removeprefix("chardev:") if is_named else host_ends.FIRST_SERIAL
    elif "serial0" in facts.labels:
        draft.console = host_ends.FIRST_SERIAL
    else:
        consoles = (one.get("chardev") for one in given if one.get("driver") in _CONSOLES)
        draft.console = next(consoles, None)
    draft.vanished = {
        drive
        for one in given
        if one.get("id") and one.get("id") not in facts.devices and (drive := one.get("drive"))
    }
    if any(holes.MARK in word for word in facts.argv):
        draft.refuse("the command line", f"it has the text '{holes.MARK}', vmckpt's own mark")
    if any("\ufffd" in word for word in facts.argv):
        draft.refuse("the command line", "it has bytes that are not valid UTF-8")
    return draft


def _console_now(draft: Draft, options: Sequence[Option]) -> Path | None:
    """The console's socket, if others may connect to it."""
    for option in options:
        value = option.value or ""
        settings = _settings(option, "backend") if option.name == "chardev" else None
        if option.name == "serial" and value.startswith("unix:"):
            settings = parse_settings(f"socket,id={draft.console},path={value[5:]}", "backend")
        if settings is None or settings.get("id") != draft.console or not settings.get("path"):
            continue
        if settings.get("backend") == "socket" and settings.get("server") == "on":
            return draft.path(settings.get("path") or "", option)
    return None


def _settings(option: Option, implied: str | None) -> Settings:
    try:
        return parse_settings(option.value or "", implied)
    except ValueError as exc:
        raise RefusedError(
            f"'{option.text}' cannot be read",
            why=f"its JSON is broken: {exc}",
            remedy="report this: QEMU has taken it",
        ) from exc


_HANDLERS: Mapping[str, Callable[[Draft, Option], None]] = (
    dict.fromkeys(images.SHORT, images.short_drive)
    | dict.fromkeys(_PORTS, host_ends.port)
    | dict.fromkeys(("netdev", "nic", "net"), host_ends.network)
    | {
        "drive": images.drive,
        "blockdev": images.blockdev,
        "chardev": host_ends.chardev,
        "device": devices.device,
        "object": devices.object_,
        "set": host_ends.setting,
    }
)


# Options whose value may name a file, with the implied key of the first value.
_FIRST_KEY = {
    "fw_cfg": "name",
    "option-rom": "romfile",
    "boot": "order",
    "smbios": None,
    "acpitable": None,
}


def _carry(draft: Draft, option: Option) -> None:
    match fate(option):
        case OptionFate.KEEP if option.name == "mem-prealloc" and draft.memory.offsets:
            pass  # vmckpt reserves the memory
        case OptionFate.KEEP:
            draft.add(option.name, option.value)
        case OptionFate.FILE:
            draft.add(option.name, draft.file(option.value or "", option))
        case OptionFate.SCREEN:
            if option.name in ("vnc", "spice"):
                draft.notes.append(f"'{option.text}' stays here: the destination shows no screen")
        case OptionFate.REFUSE:
            draft.refuse_option(option, "vmckpt cannot carry it over")
        case OptionFate.REWRITE:
            if handler := _HANDLERS.get(option.name):
                handler(draft, option)
            else:
                _rewrite(draft, option)
        case OptionFate.DROP:
            pass


def _rewrite(draft: Draft, option: Option) -> None:
    """Rewrite options that name a file or a host back end."""
    value = option.value or ""
    if option.name in ("audiodev", "audio"):
        key = "driver"
        draft.add(option.name, _silent(_settings(option, key)))
    elif option.name == "mem-path" and not draft.memory.offsets:
        draft.add("mem-path", devices.memory_directory(draft, option, value))
    elif option.name in _FIRST_KEY:
        settings = _settings(option, _FIRST_KEY[option.name])
        for key in ("file", "romfile", "splash"):
            if path := settings.get(key):
                settings = settings.put(key, str(draft.file(path, option)))
        draft.add(option.name, settings)


def _silent(settings: Settings) -> str:
    kept = [(key, settings.get(key)) for key in ("model", "id")]
    return ",".join(["driver=none", *(f"{key}={value}" for key, value in kept if value)])


def _write_out(draft: Draft, options: Sequence[Option]) -> None:
    """Write out QEMU's own choices, so that another QEMU does not choose differently."""
    given = {option.name for option in options}
    devices.machine(draft, [one for one in options if one.name in ("machine", "M")])
    devices.accelerator(draft, [one for one in options if one.name == "accel"])
    if "cpu" not in given:
        draft.add("cpu", draft.facts.platform.cpu)
    if "m" not in given:
        draft.add("m", f"{draft.facts.memory_bytes // MIB}M")
    draft.add("display", "none")


def _require_used(draft: Draft, options: Sequence[Option]) -> None:
    """Each device must use the image that its -device names, not one layered on top since."""
    ids = {_settings(one, None).get("id") for one in options if one.name == "drive"}
    nodes = {one.node for one in draft.facts.drives}
    for option in options:
        if option.name != "device":
            continue
        settings = _settings(option, "driver")
        drive = settings.get("drive")
        if drive and drive not in ids | nodes | draft.vanished:
            draft.refuse_option(option, f"it no longer uses '{drive}'")
