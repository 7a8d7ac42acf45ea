"""A host's location, in the terms of ssh(1)."""

import re
from pathlib import Path
from typing import NamedTuple, Self

from vmckpt.errors import UsageError
from vmckpt.hosts.sockets.uri import in_uri

_URL = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@/:\s]+)@)?(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^@/:\s\[\]-][^@/:\s]*))"
    r"(?::(?P<port>[0-9]{1,5}))?/?"
)


class Address(NamedTuple):
    """A host's location: `host` is a name, an address, or an alias of the SSH configuration.

    `user` and `port` None: from the configuration. `config` replaces ~/.ssh/config.
    """

    host: str
    user: str | None = None
    port: int | None = None
    config: Path | None = None

    @classmethod
    def parse(cls, text: str, config: Path | None = None) -> Self:
        """Parse ssh://[USER@]HOST[:PORT], as in ssh(1) and ProxyJump. Raises UsageError."""
        found = _URL.fullmatch(text)
        port = int(found["port"]) if found and found["port"] else None
        if found is None or port == 0 or (port or 0) > 65535:
            raise UsageError(
                f"'{text}' is not an address of a host",
                why="it must look like ssh://USER@HOST:PORT; user and port may be left out",
                remedy="e.g. ssh://root@192.0.2.7",
            )
        return cls(found["host"] or found["v6"], found["user"], port, config)

    def __str__(self) -> str:
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        return f"ssh://{user}{in_uri(self.host)}{port}"
