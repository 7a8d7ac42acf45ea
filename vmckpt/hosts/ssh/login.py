"""Log in to a host as ssh(1) would: keys, agent, jump hosts; the host key is always checked."""

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from vmckpt.errors import UsageError, VmckptError
from vmckpt.hosts.ssh.address import Address
from vmckpt.hosts.ssh.failures import no_proxy, out_of_reach, translated, unreachable
from vmckpt.hosts.ssh.known_hosts import KnownHosts
from vmckpt.hosts.ssh.settings import CONNECT_TIMEOUT_S, SSH_PORT, Settings, read_settings

AUTH_TIMEOUT_S = 30.0
MOST_JUMPS = 8
_LAST_LINES_S = 1.0


@dataclass(frozen=True, slots=True)
class Login:
    """A logged-in connection, and the one to a jump host that carries it, if any."""

    client: paramiko.SSHClient
    jump: "Login | None"

    def close(self) -> None:
        """Close it, and the connections that carry it."""
        _end(self.client)
        if self.jump is not None:
            self.jump.close()


def log_in(
    name: str, address: Address, jumps: tuple[str, ...] = (), jumps_left: int = MOST_JUMPS
) -> Login:
    """Log in to the host `name`, over `jumps` if there are any, else by the configuration.

    Blocks. Raises HostDownError for each kind of failure, UsageError for the configuration.
    """
    settings = read_settings(address)
    jump, stream = _dial(name, settings, jumps or settings.jumps, address.config, jumps_left)
    client = paramiko.SSHClient()
    try:
        _authenticate(client, name, settings, stream)
    except BaseException:
        _end(client)
        stream.close()
        if jump is not None:
            jump.close()
        raise
    return Login(client, jump)


def _authenticate(client: paramiko.SSHClient, name: str, settings: Settings, stream: Any) -> None:
    known = KnownHosts(name, settings.known_as, settings.known_hosts)
    try:
        known.load(client)
        client.set_missing_host_key_policy(known)
        client.connect(
            # With an existing stream this is used only to look up known_hosts.
            settings.known_as,
            port=SSH_PORT,
            username=settings.user,
            sock=stream,
            key_filename=[str(path) for path in settings.keys if path.exists()],
            allow_agent=settings.use_agent,
            look_for_keys=not settings.keys,
            timeout=settings.timeout_s,
            banner_timeout=settings.timeout_s,
            auth_timeout=AUTH_TIMEOUT_S,
        )
    except VmckptError:
        raise
    except paramiko.BadHostKeyException as exc:
        raise known.changed(exc.key) from exc
    # Whatever a malformed message causes in paramiko's thread is raised here.
    except Exception as exc:
        raise translated(name, f"{settings.user}@{settings.host}", exc) from exc


def _end(client: paramiko.SSHClient) -> None:
    """Close it, and wait for its thread: its last messages may pass through a jump host."""
    transport = client.get_transport()
    client.close()
    if transport is not None and transport.is_alive():
        transport.join(_LAST_LINES_S)


def _dial(
    name: str, settings: Settings, jumps: tuple[str, ...], config: Path | None, jumps_left: int
) -> tuple[Login | None, Any]:
    """A byte stream to the host's SSH server, over a jump host or a proxy command if configured."""
    where = settings.host, settings.port
    if jumps:
        return _dial_over(name, where, jumps, config, jumps_left)
    if settings.command:
        return None, _run_proxy(name, settings.command)
    try:
        stream = socket.create_connection(where, settings.timeout_s)
    # ValueError: a name that the resolver's encoding cannot represent.
    except (OSError, ValueError) as exc:
        raise unreachable(name, where, settings.timeout_s, exc) from exc
    # Otherwise the second of two short messages waits for the first one's acknowledgement: 40 ms
    # each time.
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return None, _Acknowledging(stream)


def _run_proxy(name: str, command: str) -> paramiko.ProxyCommand:
    try:
        return paramiko.ProxyCommand(command)
    # ValueError: unbalanced quotes.
    except (OSError, ValueError) as exc:
        raise no_proxy(name, command, exc) from exc


def _dial_over(
    name: str,
    where: tuple[str, int],
    jumps: tuple[str, ...],
    config: Path | None,
    jumps_left: int,
) -> tuple[Login, Any]:
    """A byte stream to `where` from the last of `jumps`, which is reached over those before it."""
    if jumps_left == 0:
        raise UsageError(
            f"{name} is behind more than {MOST_JUMPS} jump hosts",
            why="they may name one another",
            remedy="fix ProxyJump in the SSH configuration",
        )
    *before, last = jumps
    jump = log_in(f"{last}, the jump host of {name},", Address.parse(last, config), tuple(before),
                  jumps_left - 1)  # fmt: skip
    transport = jump.client.get_transport()
    try:
        channel = transport.open_channel(
            "direct-tcpip", where, ("127.0.0.1", 0), timeout=CONNECT_TIMEOUT_S
        )
    except Exception as exc:  # as in `_authenticate`
        jump.close()
        raise out_of_reach(name, last, where, exc) from exc
    return jump, _OverJump(channel)


class _Acknowledging:
    """A socket that acknowledges received data at once (TCP_QUICKACK).

    The kernel resets the option with the next data that it sends.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def recv(self, most_bytes: int) -> bytes:
        data = self._stream.recv(most_bytes)
        with suppress(OSError):  # the far side has gone: the next call reports it
            self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data


class _OverJump:
    """A channel that may be closed after its jump host is gone.

    paramiko also closes it in a thread of its own, where an error would print a traceback.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def close(self) -> None:
        with suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.close()
