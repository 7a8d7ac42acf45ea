"""SSH connections to hosts: the only package that imports paramiko."""

import sys
from importlib import import_module
from types import ModuleType


class _Later(ModuleType):
    """A placeholder for a module, which is imported on first use."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # what the import system looks for
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        found: object = getattr(import_module(self.__name__), name)
        return found


# paramiko needs it only for `Match exec`, and it accounts for a third of paramiko's import time.
sys.modules.setdefault("invoke", _Later("invoke"))
