"""Options that are given to several commands together: said once, as the fields of a NamedTuple."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def together(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer has to see it: a parameter that is a NamedTuple is that one's fields.

    Each of these is a parameter of the command then, in its place, with the default that it has.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if _is_group(hint)}
    seen = list[Parameter]()
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            seen += _fields(groups[name])
        else:
            seen.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field: given.pop(field) for field in group._fields})
        command(**given)

    called.__annotations__ = {parameter.name: parameter.annotation for parameter in seen}
    called.__dict__["__signature__"] = Signature(seen)  # which `inspect.signature` gives
    return called


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _fields(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    defaults = group._field_defaults
    return [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=defaults.get(name, Parameter.empty),
            annotation=hints[name],
        )
        for name in group._fields
    ]
