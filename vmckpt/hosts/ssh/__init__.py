"""SSH connections to hosts: the only package that imports paramiko."""

import sys
from importlib import import_module
from types import ModuleType


class _Later(ModuleType):
    """Stands for a module until something of it is used."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # what the import system looks for
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        found: object = getattr(import_module(self.__name__), name)
        return found


# paramiko needs it for `Match exec` alone, and importing it is a third of importing paramiko.
sys.modules.setdefault("invoke", _Later("invoke"))
