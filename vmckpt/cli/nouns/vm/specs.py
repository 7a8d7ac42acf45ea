"""vmckpt vm define, edit, import, export: what a VM is, while it is off."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vmckpt.cli.options.arguments import HostOption, SpecFile, VmName
from vmckpt.cli.output import Json, run, show
from vmckpt.errors import RefusedError, UsageError
from vmckpt.ui.shown import one_line


class ExportFormat(StrEnum):
    """What `vm export` writes."""

    LIBVIRT = "libvirt"
    SPEC = "spec"


def define(spec: SpecFile, host: HostOption = "local", json: Json = False) -> None:
    """Create a VM from a spec and leave it off."""
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.vm.create import define_vm, read_spec

    vm = run(define_vm(read_spec(spec), find_host(host)))
    _show_off(vm.name, vm.host.name, (), as_json=json)


def edit(
    name: VmName,
    spec: Annotated[
        Path | None,
        typer.Option("--spec", help="Take the spec from this file.", metavar="FILE"),
    ] = None,
    json: Json = False,
) -> None:
    """Change the spec of a VM that is off, in an editor."""
    from vmckpt.cli.found import find_own
    from vmckpt.vm.create import read_spec, redefine_vm
    from vmckpt.vm.spec.spec import parse_spec

    vm = run(find_own(name, "edit"))
    if spec is not None:
        edited = read_spec(spec)
    else:
        text = _edited(vm.spec.text)
        edited = parse_spec(text, "the edited spec", vm.directory.path)
    vm = run(redefine_vm(vm, edited))
    _show_off(vm.name, vm.host.name, (), as_json=json)


def _edited(text: str) -> str:
    """The text as the user left it in an editor. Raises UsageError, RefusedError."""
    import click

    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UsageError(
            "there is no terminal for an editor",
            why="the command's input or output is a pipe or a file",
            remedy="name the spec: --spec FILE (`vmckpt vm export VM` prints the present one)",
        )
    try:
        edited = click.edit(text, extension=".toml")
    except click.ClickException as exc:
        raise UsageError(
            "the editor failed", why=exc.format_message(), remedy="set EDITOR, or use --spec FILE"
        ) from exc
    if edited is None or edited == text:
        raise RefusedError("nothing was changed", why="the spec is as before", remedy="none")
    return edited


def import_(
    domain: Annotated[
        str, typer.Argument(help="The domain's name, or a file of its XML.", metavar="DOMAIN|FILE")
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the VM. [default: the domain's]", metavar="NAME"),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Host of the VM, with a FILE.", metavar="HOST")
    ] = None,
    json: Json = False,
) -> None:
    """Make a stopped libvirt domain a VM of vmckpt's own."""
    from vmckpt.cli.found import find_domain
    from vmckpt.hosts.inventory.inventory import find_host
    from vmckpt.vm.imported.from_domain import import_domain, import_xml

    if domain.endswith(".xml"):
        imported = run(import_xml(_read(Path(domain)), find_host(host or "local"), name))
    elif host is not None:
        raise UsageError(
            "--host does not go with a domain's name",
            why="the VM stays on the domain's host",
            remedy="leave it out, or name a file of XML (NAME.xml)",
        )
    else:
        imported = run(import_domain(run(find_domain(domain)), name or domain))
    _show_off(imported.vm.name, imported.vm.host.name, imported.notes, as_json=json)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read {path}", why=str(exc), remedy="name a domain, or a file of its XML"
        ) from exc


def export(
    name: VmName,
    export_format: Annotated[
        ExportFormat, typer.Option("--format", help="A spec, or libvirt's XML.")
    ] = ExportFormat.SPEC,
    json: Json = False,
) -> None:
    """Print a VM's spec, or the XML for `virsh define`."""
    from vmckpt.cli.found import find_own
    from vmckpt.vm.imported.domain_xml import domain_of

    vm = run(find_own(name, "export"))
    text = vm.spec.text
    if export_format is ExportFormat.LIBVIRT:
        text = domain_of(vm)
    facts = {"vm": vm.name, "host": vm.host.name, "format": export_format.value, "text": text}
    show(facts, text.removesuffix("\n"), as_json=json)


def _show_off(name: str, host: str, notes: tuple[str, ...], *, as_json: bool) -> None:
    facts = {"vm": name, "host": host, "state": "stopped", "notes": notes}
    told = "".join(f"\n  note: {one_line(note)}" for note in notes)
    show(facts, f"{name} is on {host}, and off{told}", as_json=as_json)
