"""Host ends of a guest's devices: character devices and networks, replaced by vmckpt's."""

import re
from collections.abc import Sequence

from vmckpt.vm.adopted import holes
from vmckpt.vm.adopted.draft import Draft
from vmckpt.vm.adopted.options import Option
from vmckpt.vm.adopted.settings import JsonObject, KeyValues, Settings, parse_settings

# Back ends without a host end.
_INWARD = frozenset({"null", "ringbuf", "memory", "msmouse", "testdev", "wctablet"})
# Back ends without a peer: a socket of vmckpt's replaces them.
_REPLACED = frozenset(
    {"stdio", "pty", "file", "pipe", "vc", "spicevmc", "spiceport", "qemu-vdagent", "dbus",
     "console", "fd"}
)  # fmt: skip
_TAP_HOST_KEYS = (
    "ifname", "script", "downscript", "br", "helper", "fd", "fds", "vhost", "vhostfd", "vhostfds",
    "vhostforce", "sndbuf", "vnet_hdr",
)  # fmt: skip
# The name of the first serial port's character device if it has none.
FIRST_SERIAL = "vmckpt-serial1"
# In -set: how a drive is accessed, whatever its image.
_TUNED = re.compile(
    r"drive\.[^.]+\.(cache|cache\.\w+|aio|discard|detect-zeroes|[rw]error|throttling\.[\w-]+)="
)
_FORWARD = re.compile(r"(?:tcp)?:[^:]*:(\d+)-")


def chardev(draft: Draft, option: Option) -> None:
    """-chardev: the host's end becomes a socket; those of monitors are dropped."""
    settings = parse_settings(option.value or "", "backend")
    name, backend = settings.get("id") or "", settings.get("backend")
    if not draft.users[name]:
        return  # a monitor's
    if backend in _INWARD:
        draft.add("chardev", settings)
        return
    if why := _unreplaceable(settings):
        draft.refuse_option(option, why)
        return
    mux = draft.users[name] > 1
    _add_socket(draft, name, mux=mux)


def _unreplaceable(settings: Settings) -> str | None:
    backend = settings.get("backend") or ""
    if backend in ("socket", "udp"):
        server = (settings.get("server") or "off") in ("on", "yes", "true")
        if backend == "socket" and server:
            return None
        return "it connects to a program outside, which does not move with the VM"
    if backend in _REPLACED:
        return None
    return f"its backend '{backend}' belongs to the host"


def _add_socket(draft: Draft, name: str, *, mux: bool = False) -> None:
    """Add a socket for the new QEMU, with a log of the guest's output."""
    agent = name == draft.agent
    file = f"{holes.DIRECTORY}/agent"
    if name == draft.console:
        file = f"{holes.DIRECTORY}/console"
    elif not agent:
        draft.chardevs += 1
        file = f"{holes.DIRECTORY}/chardev{draft.chardevs}"
    pairs = [("backend", "socket"), ("id", name), ("path", f"{file}.sock")]
    pairs += [("server", "on"), ("wait", "off")]
    if not agent:
        pairs += [("logfile", f"{file}.log"), ("logappend", "on")]
    draft.add("chardev", KeyValues((*pairs, *((("mux", "on"),) if mux else ()))))


def port(draft: Draft, option: Option) -> None:
    """-serial, -parallel and -debugcon: the same port, on a socket."""
    value = option.value or ""
    draft.ports[option.name] += 1
    if value in ("none", "null", "msmouse") or value.startswith("chardev:"):
        draft.add(option.name, value)
        return
    if value.startswith(("tcp:", "telnet:", "unix:", "websocket:", "udp:")):
        server = re.search(r",server(=on|=yes|,|$)", value)
        if value.startswith("udp:") or not server:
            why = "it connects to a program outside, which does not move with the VM"
            draft.refuse_option(option, why)
            return
    elif value.startswith("/dev/") and not value.startswith(("/dev/null", "/dev/pts")):
        draft.refuse_option(option, "it is a port of the host itself")
        return
    elif value.startswith(("stdio", "mon:stdio")):
        draft.notes.append(f"'{option.text}' is `vmckpt vm console` when the VM has moved")
    name = f"vmckpt-{option.name}{draft.ports[option.name]}"
    _add_socket(draft, name)
    draft.add(option.name, f"chardev:{name}")


def default_console(draft: Draft) -> None:
    """QEMU's default serial port, on a socket."""
    if draft.ports["serial"] == 0 and "serial0" in draft.facts.labels:
        port(draft, Option("serial", "vc"))


def setting(draft: Draft, option: Option) -> None:
    """-set: it counts, whatever the option says that it changes, which is rewritten."""
    value = option.value or ""
    if not value.startswith("device.") and not _TUNED.match(value):
        draft.refuse_option(option, "it is not of a device of the guest's")
    elif "/" in value:
        draft.refuse_option(option, "it names a file")
    else:
        draft.add("set", value)


def network(draft: Draft, option: Option) -> None:
    """-netdev, -nic and -net: a tap becomes vmckpt's own, on the destination's bridge."""
    settings = parse_settings(option.value or "", "type")
    kind = settings.get("type") or ("user" if option.name == "nic" else None)
    if kind == "user":
        _user(draft, option, settings)
        draft.nics.append("user")
        draft.add(option.name, settings)
    elif kind in ("tap", "bridge"):
        draft.add(option.name, _tap(draft, settings.put("type", "tap")))
    elif kind in ("nic", "none"):
        draft.add(option.name, settings)
    else:
        why = f"a network of type '{kind}' is tied to programs on its host"
        draft.refuse_option(option, why)


def default_network(draft: Draft, options: Sequence[Option]) -> None:
    """QEMU's default NIC with its user-mode network (system/vl.c).

    Made explicit, because only what is on the command line can be isolated.
    """
    names = {option.name for option in options} & {"netdev", "nic", "net", "nodefaults"}
    if not names and any(words.startswith("user") for words in draft.facts.networks.values()):
        network(draft, Option("net", "nic"))
        network(draft, Option("net", "user"))


def _user(draft: Draft, option: Option, settings: Settings) -> None:
    for key in ("smb", "guestfwd", "tftp"):
        if settings.get(key):
            draft.refuse_option(option, f"{key}= is served from the host")
    draft.forwards += [
        int(found[1]) for rule in settings.all("hostfwd") if (found := _FORWARD.match(rule))
    ]


def _tap(draft: Draft, settings: Settings) -> Settings:
    descriptors = settings.get("fds")
    if settings.get("vhost") == "on":
        draft.notes.append(f"'{settings.get('id') or 'a NIC'}' goes on without vhost")
    settings = settings.without(*_TAP_HOST_KEYS)
    if descriptors and settings.get("queues") is None:
        settings = settings.put("queues", len(descriptors.split(":")))
    draft.nics.append("bridge")
    settings = settings.put("ifname", holes.tap(len(draft.nics) - 1))
    if isinstance(settings, JsonObject):
        return settings.put("script", "no").put("downscript", "no").put("vhost", False)
    return settings.put("script", "no").put("downscript", "no").put("vhost", "off")


def plugged_network(draft: Draft, name: str) -> None:
    """A network back end that was plugged in later, as QEMU describes it."""
    words = draft.facts.networks.get(name, "")
    if words.startswith("tap,") or words == "tap":
        network(draft, Option("netdev", f"tap,id={name}"))
    elif words in ("user,net=10.0.2.0,restrict=off", "user"):
        network(draft, Option("netdev", f"user,id={name}"))
        draft.notes.append(f"host ports forwarded to '{name}' are not carried over")
    else:
        draft.refuse(f"the network '{name}'", f"it was plugged later, as '{words}'")
