"""vmckpt host: list, check."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli.output import Json, run, show

if TYPE_CHECKING:
    from vmckpt.hosts.host import Host

app = typer.Typer(help="Machines that VMs live on.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_(json: Json = False) -> None:
    """List the hosts."""
    from vmckpt.hosts.inventory import all_hosts
    from vmckpt.ui.tables import table

    hosts = all_hosts()
    rows = [(host.name, host.migration_address, host.qemu, str(host.state_dir)) for host in hosts]
    text = table(("name", "migration address", "qemu", "state directory"), rows)
    show({"hosts": [_facts(host) for host in hosts]}, text, as_json=json)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="The host's name.")] = "local", json: Json = False
) -> None:
    """Ask a host what it can do."""
    from vmckpt.hosts.inventory import find_host
    from vmckpt.ui.tables import fields

    facts = run(_check(find_host(name)))
    show(
        facts,
        fields([(key.replace("_", " "), str(value)) for key, value in facts.items()]),
        as_json=json,
    )


async def _check(host: "Host") -> dict[str, Any]:
    from vmckpt.vm.probe import abilities, kvm_obstacle

    await host.require_up()
    await host.make_dir(host.state_dir)
    found = await abilities(host)
    obstacle = await kvm_obstacle(host)
    return _facts(host) | {
        "qemu_version": str(found.version),
        "newest_q35": found.machines.get("q35"),
        "accelerator": "kvm" if obstacle is None else "tcg",
        "why_not_kvm": obstacle,
        "postcopy": "postcopy-ram" in found.capabilities,
        "parallel": "multifd" in found.capabilities,
        "compressions": sorted(found.compressions),
        "memory_available_bytes": await host.available_memory_bytes(),
        "state_free_bytes": await host.free_bytes(host.state_dir),
    }


def _facts(host: "Host") -> dict[str, Any]:
    return {
        "name": host.name,
        "migration_address": host.migration_address,
        "qemu": host.qemu,
        "bridge": host.bridge,
        "state_dir": str(host.state_dir),
    }
