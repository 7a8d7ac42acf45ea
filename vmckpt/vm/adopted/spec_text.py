"""The spec (TOML) of an adopted VM. Pure."""

import json
from collections.abc import Iterator

from vmckpt.units import MIB
from vmckpt.vm.adopted.facts import AdoptedFacts
from vmckpt.vm.adopted.rewrite import Rewritten
from vmckpt.vm.paths import IN_MEMORY


def spec_text(name: str, facts: AdoptedFacts, made: Rewritten) -> str:
    """The spec that `parse_spec` reads back: the machine, its disks and NICs, and its command
    line.
    """
    return "\n".join(_lines(name, facts, made)) + "\n"


def _lines(name: str, facts: AdoptedFacts, made: Rewritten) -> Iterator[str]:
    yield f"name = {_quoted(name)}"
    yield f'memory = "{facts.memory_bytes // MIB}M"'
    if made.ram_dir != IN_MEMORY:
        yield f"ram_dir = {_quoted(str(made.ram_dir))}"
    yield f"vcpus = {facts.vcpus}"
    yield f"machine = {_quoted(facts.platform.machine)}"
    yield f"accel = {_quoted(facts.platform.accel)}"
    yield f"cpu = {_quoted(facts.platform.cpu)}"
    yield f"guest_agent = {'true' if made.guest_agent else 'false'}"
    for disk in made.disks:
        key = "path" if disk.path.is_absolute() else "image"
        yield "\n[[disks]]"
        yield f"{key} = {_quoted(str(disk.path) if key == 'path' else disk.path.name)}"
        yield f"format = {_quoted(disk.format)}"
        yield f"read_only = {'true' if disk.read_only else 'false'}"
        yield f"node = {_quoted(disk.node)}"
    for nic in made.nics:
        yield f"\n[[nics]]\nnetwork = {_quoted(nic)}"
    yield "\n[adopted]"
    yield f"arguments = [{', '.join(_quoted(word) for word in made.arguments)}]"
    yield f"files = [{', '.join(_quoted(str(path)) for path in made.files)}]"
    yield f"forwards = [{', '.join(str(number) for number in made.forwards)}]"


def _quoted(text: str) -> str:
    # A TOML string is a JSON string, except for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
