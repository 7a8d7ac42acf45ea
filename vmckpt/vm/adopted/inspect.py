"""Query a running QEMU, and /proc on its host, for adoption. Changes nothing."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vmckpt.errors import NotFoundError, RefusedError
from vmckpt.hosts.host import Host
from vmckpt.procfs import status_fields
from vmckpt.qemu import commands, inside
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.adopted.facts import AdoptedFacts
from vmckpt.vm.adopted.options import split_options
from vmckpt.vm.adopted.settings import parse_settings
from vmckpt.vm.paths import images_dir
from vmckpt.vm.record import Platform

_HUGETLBFS = "hugetlbfs"


async def process_of(monitor: Monitor, host: Host, pid: int | None) -> int:
    """The process behind a monitor: the one that has its vCPU threads.

    Raises RefusedError if `pid` is another, or no process of this host has these threads.
    """
    found = await process_behind(monitor, host, pid)
    await _require_same_files(host, found)
    return found


async def process_behind(monitor: Monitor, host: Host, pid: int | None = None) -> int:
    """As `process_of`, whatever files the process sees."""
    threads = {cpu.thread_id for cpu in await commands.query_cpus(monitor)}
    found = pid
    if found is None:
        status = await host.read_text(Path(f"/proc/{min(threads)}/status")) or ""
        owners = status_fields(status).get("Tgid")
        found = int(owners[0]) if owners else None
    own = {name for name in await host.list_dir(Path(f"/proc/{found}/task"))} if found else set()
    if found is None or not {str(thread) for thread in threads} <= own:
        raise RefusedError(
            f"the QEMU behind the monitor is not {f'process {pid}' if pid else 'found'}",
            why=f"on {host.name} its vCPUs' threads ({', '.join(map(str, sorted(threads)))}) are "
            "not that process's",
            remedy="name its own socket and --pid; one in a container cannot be adopted",
        )
    return found


async def _require_same_files(host: Host, pid: int) -> None:
    """Its paths must refer to the same files for us as for it."""
    done = await host.run(["readlink", "/proc/self/ns/mnt", f"/proc/{pid}/ns/mnt"])
    here, _, there = done.stdout.strip().partition("\n")
    if done.returncode or here != there:
        why = "it runs in another mount namespace (a container), or may not be looked at"
        raise RefusedError(
            f"the files of process {pid} on {host.name} cannot be found",
            why=why,
            remedy="run vmckpt as the QEMU's user or as root, where it runs",
        )


async def adopted_facts(monitor: Monitor, host: Host, pid: int) -> AdoptedFacts:
    """The QEMU's present state. Raises RefusedError, NotFoundError (the process has ended)."""
    text = await host.read_text(Path(f"/proc/{pid}/cmdline"))
    if not text:
        raise NotFoundError(
            f"there is no process {pid} on {host.name}",
            why="it has ended",
            remedy="name a QEMU that runs",
        )
    argv = tuple(text.removesuffix("\0").split("\0"))
    if (kind := await inside.query_architecture(monitor)) != "x86_64":
        raise RefusedError(
            f"it is a machine of kind {kind}", why="vmckpt supports only x86_64", remedy="none"
        )
    devices = await commands.qom_children(monitor, "/machine/peripheral")
    named = _ids(argv, "device")
    cpus = await commands.query_cpus(monitor)
    kind = await commands.qom_get(monitor, "/machine", "type", str)
    model = await commands.qom_get(monitor, cpus[0].qom_path, "type", str)
    machine = str(kind).removesuffix("-machine")
    kvm = await commands.query_kvm(monitor)
    late, paths = devices.keys() - named, list(_memory_paths(argv))
    modules = await inside.query_memory_modules(monitor)
    on_buses = sorted(devices.keys() - modules.keys())
    slots = {name: await inside.query_slot(monitor, name) for name in on_buses}
    return AdoptedFacts(
        argv=argv,
        cwd=await host.resolve(Path(f"/proc/{pid}/cwd")),
        platform=Platform(machine, "kvm" if kvm else "tcg", _cpu(argv, str(model))),
        ram_id=await inside.query_ram_id(monitor, machine),
        memory_bytes=await inside.query_memory_bytes(monitor),
        back_ends=await inside.query_back_ends(monitor),
        version=await commands.query_version(monitor),
        vcpus=len(cpus),
        drives=await inside.query_drives(monitor),
        devices=devices,
        late={
            name: await inside.device_settings(monitor, name, devices[name])
            for name in sorted(late)
        },
        modules=modules,
        slots={name: slot for name, slot in slots.items() if slot is not None},
        networks=await inside.query_networks(monitor),
        labels=await inside.query_chardev_labels(monitor),
        directories=await _directories(host, paths),
        huge_pages=await _huge_pages(host, paths),
        images_dir=images_dir(host.state_dir),
    )


def _ids(argv: tuple[str, ...], name: str) -> set[str]:
    given = [option.value or "" for option in split_options(argv[1:]) if option.name == name]
    return {found for value in given if (found := parse_settings(value, "driver").get("id"))}


def _cpu(argv: tuple[str, ...], model: str) -> str:
    """The CPU with its features as requested, otherwise the machine type's default."""
    given = [option.value or "" for option in split_options(argv[1:]) if option.name == "cpu"]
    return given[-1] if given else model.removesuffix("-x86_64-cpu")


def _memory_paths(argv: Sequence[str]) -> Iterator[str]:
    for option in split_options(argv[1:]):
        path = option.value if option.name == "mem-path" else None
        if option.name == "object":
            path = parse_settings(option.value or "", "qom-type").get("mem-path")
        if path:
            yield path


async def _directories(host: Host, paths: Iterable[str]) -> frozenset[str]:
    """Those that are directories."""
    found = {path for path in paths if (await host.run(["test", "-d", path])).returncode == 0}
    return frozenset(found)


async def _huge_pages(host: Host, paths: Iterable[str]) -> frozenset[str]:
    """Those that are absolute, and in huge pages."""
    words = ["stat", "--file-system", "--format=%T", "--"]
    found = set()
    for path in paths:
        if path.startswith("/"):
            # A file may have lost its name.
            for at in (path, str(Path(path).parent)):
                done = await host.run([*words, at])
                if done.returncode == 0:
                    found |= {path} if done.stdout.strip() == _HUGETLBFS else set()
                    break
    return frozenset(found)
