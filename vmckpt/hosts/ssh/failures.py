"""Failures of SSH connections, as errors with a remedy."""

import errno
import socket

import paramiko

from vmckpt.errors import HostDownError

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def translated(name: str, login: str, exc: Exception) -> HostDownError:
    """Why the SSH server of the host `name` rejected `login`."""
    match exc:
        case paramiko.PasswordRequiredException():
            why = "the key is protected by a passphrase, and no agent has it"
            return _no_entry(name, login, why, "ssh-add, then try again")
        case paramiko.AuthenticationException():
            why = f"its SSH server accepts none of our keys: {exc}"
            return _no_entry(name, login, why, f"ssh-copy-id {login}")
        case TimeoutError():
            why = "no answer in time"
        case _:
            why = str(exc) or "it closed the connection"
    return HostDownError(
        f"the SSH server of {name} does not answer like one",
        why=why,
        remedy="check that sshd listens at that address and port, and read its log",
    )


def _no_entry(name: str, login: str, why: str, remedy: str) -> HostDownError:
    return HostDownError(f"{name} does not let {login} in", why=why, remedy=remedy)


def unreachable(
    name: str, where: tuple[str, int], timeout_s: float, exc: OSError | ValueError
) -> HostDownError:
    """Why an address and port could not be reached."""
    host, port = where
    match exc:
        case socket.gaierror():
            why = f"the name '{host}' cannot be resolved: {exc.strerror}"
            remedy = "fix the name, or give an address: vmckpt host set NAME --address ssh://..."
        case ValueError():
            why = f"'{host}' is not a name of a host: {exc}"
            remedy = "fix the name, or give an address: vmckpt host set NAME --address ssh://..."
        case ConnectionRefusedError():
            why = f"nothing listens on port {port} of {host}"
            remedy = "start its SSH server, or give the right port: ssh://USER@HOST:PORT"
        case TimeoutError():
            why = f"{host} did not answer within {timeout_s:g} s"
            remedy = "check that it runs, and the firewalls between here and there"
        case OSError() if exc.errno in _NO_DESCRIPTOR:
            return no_descriptor(name, exc)
        case _:
            why = f"{host} cannot be reached: {exc.strerror or exc}"
            remedy = "check this machine's network and routes"
    return HostDownError(f"cannot reach {name}", why=why, remedy=remedy)


def no_descriptor(name: str, exc: OSError) -> HostDownError:
    """This process has too many hosts, or files, open."""
    return HostDownError(
        f"cannot connect to {name} from here",
        why=exc.strerror or str(exc),
        remedy="raise this machine's limit of open files, e.g. ulimit -n 65536",
    )


def no_proxy(name: str, command: str, exc: OSError | ValueError) -> HostDownError:
    """Why the configuration's proxy command cannot be run."""
    return HostDownError(
        f"cannot reach {name}",
        why=f"its ProxyCommand `{command}` does not start: {exc}",
        remedy="fix ProxyCommand in the SSH configuration",
    )


def out_of_reach(name: str, jump: str, where: tuple[str, int], exc: Exception) -> HostDownError:
    """Why a jump host could not connect to its destination."""
    return HostDownError(
        f"cannot reach {name}",
        why=f"its jump host {jump} cannot connect to {where[0]} port {where[1]}: {exc}",
        remedy="check the address, and that sshd on the jump host has AllowTcpForwarding",
    )


def runs_nothing(name: str, exc: Exception) -> HostDownError:
    """Logged in, but no command can be started."""
    return HostDownError(
        f"{name} refuses to run a command",
        why=str(exc) or "it closed the connection",
        remedy="check its sshd: MaxSessions, ForceCommand, the user's shell",
    )
