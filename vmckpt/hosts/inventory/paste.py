"""Shell lines to paste: what you do on a host, or to its inventory entry."""

import re
import shlex
from dataclasses import dataclass

from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.ssh.entry import SshEntry

# Characters that need no quoting in a shell word.
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+./:,@% ")


@dataclass(frozen=True, slots=True)
class Paste:
    """Shell lines for the host of an entry. `root`: the login there is root."""

    entry: LocalHost | SshEntry
    root: bool

    def there(self, command: str, *, asks: bool = False) -> str:
        """A shell line as the user who logs in there; `asks`: it may ask for a password."""
        if isinstance(self.entry, SshEntry):
            return shlex.join([*_login(self.entry, terminal=asks), command])
        if self.entry.enter:
            return shlex.join([*self.entry.enter, "sh", "-c", command])
        return command

    def as_root(self, command: str) -> str:
        """A shell line as root."""
        if self.root:
            return self.there(command)
        words = command if set(command) <= _PLAIN else f"sh -c {in_double_quotes(command)}"
        return self.there(f"sudo {words}", asks=True)

    def set(self, *words: str) -> str:
        """Change the entry: options of `vmckpt host set`."""
        return shlex.join(["vmckpt", "host", "set", self.entry.name, *words])


def in_double_quotes(text: str) -> str:
    """Quote one word with double quotes, which stay readable inside single quotes."""
    escaped = re.sub(r'(["\\$`])', r"\\\1", text)
    return f'"{escaped}"'


def _login(entry: SshEntry, *, terminal: bool) -> list[str]:
    where = entry.address
    config = ["-F", str(where.config)] if where.config else []
    port = ["-p", str(where.port)] if where.port else []
    start = ["ssh", "-t"] if terminal else ["ssh"]
    return [*start, *config, *port, f"{where.user}@{where.host}" if where.user else where.host]
