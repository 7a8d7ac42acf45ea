"""Options that are declared once, and what a command takes of them.

Those of one command or several are the fields of a NamedTuple, each with its typer option; those of
an operation are declared by it (`options/declared.py`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer

from vmckpt.options.declared import Declared, declarations, is_declared, read

_BY_NAME = Parameter.KEYWORD_ONLY


class Only(NamedTuple):
    """Beside the type of a parameter: of an operation's options the command takes these alone."""

    fields: tuple[str, ...]


class _Group(NamedTuple):
    """A parameter that consists of several options: how typer declares them, and their value."""

    options: tuple[Parameter, ...]
    value: Callable[[Mapping[str, Any]], Any]


def together(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer has to see it: a parameter that is a group is the group's options.

    Each of these is a parameter of the command then, in its place, with the default that it has.
    All are given by name.
    """
    groups, seen = dict[str, _Group](), list[Parameter]()
    for name, parameter in signature(command).parameters.items():
        if (group := _group(parameter.annotation)) is not None:
            groups[name] = group
            seen += group.options
        else:
            seen.append(parameter.replace(kind=_BY_NAME))

    @wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            words = {one.name: given.pop(one.name, one.default) for one in group.options}
            given[name] = group.value(words)
        command(**given)

    called.__annotations__ = {parameter.name: parameter.annotation for parameter in seen}
    called.__dict__["__signature__"] = Signature(seen)  # `inspect.signature` returns it
    return called


def _group(hint: Any) -> _Group | None:
    kind, *beside = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not isinstance(kind, type):
        return None
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _Group(tuple(_fields(kind)), lambda given: kind(**given))
    if is_declared(kind):
        only = next((one.fields for one in beside if isinstance(one, Only)), None)
        return _Group(tuple(_declared(kind, only)), lambda given: read(kind, given))
    return None


def option_of(kind: Any, name: str) -> Any:
    """One option of an operation, as typer takes it: for a command that requires it."""
    return _typer_option(dict(declarations(kind))[name])


def _typer_option(found: Declared) -> Any:
    least, most = found.span
    return typer.Option(*found.flags, help=found.help, min=least, max=most, metavar=found.metavar)


def _fields(group: Any) -> Iterator[Parameter]:
    hints, defaults = group.__annotations__, group._field_defaults
    for name in group._fields:
        default = defaults.get(name, Parameter.empty)
        yield Parameter(name, _BY_NAME, default=default, annotation=hints[name])


def _declared(kind: Any, only: Collection[str] | None) -> Iterator[Parameter]:
    for name, found in declarations(kind):
        if only is None or name in only:
            annotation: Any = Annotated[found.typed, _typer_option(found)]
            yield Parameter(name, _BY_NAME, default=found.usual, annotation=annotation)
