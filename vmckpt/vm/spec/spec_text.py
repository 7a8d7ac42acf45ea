"""Write a spec as TOML: for a VM that is made from another one. Pure."""

import json
from pathlib import Path
from typing import Any

from vmckpt.units import MIB
from vmckpt.vm.passthrough.passthrough import Passthrough
from vmckpt.vm.paths import IMAGES
from vmckpt.vm.spec.spec import Disk, Nic, Spec


def written(spec: Spec) -> str:
    """TOML that `parse_spec` reads as `spec`, wherever it is; `spec.text` is ignored."""
    lines = [
        _line("name", spec.name),
        _line("memory", f"{spec.memory_bytes // MIB}M"),
        _line("vcpus", spec.vcpus),
        _line("machine", spec.machine),
        _line("accel", spec.accel),
        _line("cpu", spec.cpu),
        _line("guest_agent", spec.guest_agent),
        *([] if spec.sandbox == (spec.adopted is None) else [_line("sandbox", spec.sandbox)]),
        _line("ram_dir", str(spec.ram_dir)),
    ]
    if spec.heartbeat_id is not None:
        lines.append(_line("heartbeat_id", spec.heartbeat_id))
    lines += [_line("overcommit", True)] if spec.overcommit else []
    lines += [_line("autostart", True)] if spec.autostart else []
    if spec.boot:
        lines += ["", "[boot]", _line("kernel", str(spec.boot.kernel))]
        if spec.boot.initrd:
            lines.append(_line("initrd", str(spec.boot.initrd)))
        lines.append(_line("cmdline", spec.boot.cmdline))
    if spec.firmware:
        lines += ["", "[firmware]"]
        lines += [_line(name, str(path)) for name, path in spec.firmware._asdict().items()]
    for disk in spec.disks:
        lines += ["", "[[disks]]", *_disk(disk, has_node=spec.adopted is not None)]
    for nic in spec.nics:
        lines += ["", "[[nics]]", *_nic(nic)]
    for device in spec.devices:
        lines += ["", "[[devices]]", *(_line(name, value) for name, value in device.items())]
    for one in spec.passthrough:
        lines += ["", "[[passthrough]]", *_passthrough(one)]
    if any(spec.placement):
        lines += ["", "[placement]"]
        lines += [_line(name, words) for name, words in spec.placement._asdict().items()]
    if spec.adopted:
        lines += [
            "",
            "[adopted]",
            _line("arguments", list(spec.adopted.arguments)),
            _line("files", [str(path) for path in spec.adopted.files]),
            _line("forwards", list(spec.adopted.forwards)),
            *([_line("domain", spec.adopted.domain)] if spec.adopted.domain else []),
        ]
    return "\n".join(lines) + "\n"


def _passthrough(device: Passthrough) -> list[str]:
    lines = [
        _line("id", device.id),
        _line("driver", device.driver),
        _line("strategy", device.strategy.value),
    ]
    if device.match:
        lines.append(_line("match", device.match))
    if device.hook:
        lines.append(_line("hook", device.hook))
    if device.memory_bytes:
        lines.append(_line("memory", str(device.memory_bytes)))
    if device.limits_s:
        lines.append(_line("limits_s", device.limits_s))
    if device.options:
        lines.append(_line("options", device.options))
    if device.nic is not None:
        lines.append(_line("nic", device.nic))
    if device.ssh is not None:
        lines.append(_line("ssh", str(device.ssh)))
    return lines


def _disk(disk: Disk, *, has_node: bool) -> list[str]:
    own = disk.path.parent == Path(IMAGES)
    lines = [
        _line("image", disk.path.name) if own else _line("path", str(disk.path)),
        _line("format", disk.format),
        _line("read_only", disk.read_only),
        _line("cache", disk.cache),
    ]
    if disk.size_bytes is not None:
        lines.append(_line("size", str(disk.size_bytes)))
    if has_node:
        lines.append(_line("node", disk.node))
    return lines


def _nic(nic: Nic) -> list[str]:
    lines = [_line("network", nic.network)]
    if nic.mac:
        lines.append(_line("mac", nic.mac))
    if nic.isolated:
        lines.append(_line("isolated", nic.isolated))
    return lines


def _line(name: str, value: object) -> str:
    return f"{json.dumps(name, ensure_ascii=False)} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(_line(name, inner) for name, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    # JSON texts, integers and booleans are the same in TOML, except for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
