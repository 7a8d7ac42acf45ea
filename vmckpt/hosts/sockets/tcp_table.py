"""Parse the kernel's tables of TCP sockets (/proc/net/tcp and tcp6, proc(5))."""

import ipaddress

from vmckpt.hosts.host import Queues

ESTABLISHED, LISTEN = "01", "0A"


def listening_ports(tables: str, address: str) -> frozenset[int]:
    """Ports with a listener at `address` or at all addresses.

    If the address is a name, every listener counts.
    """
    here = _as_in_proc(address)
    found = set()
    for line in tables.splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[3] != LISTEN:
            continue
        local, _, port = fields[1].partition(":")
        if here in (local, None) or not local.strip("0"):
            found.add(int(port, 16))
    return frozenset(found)


def table_queues(tables: str, port: int) -> Queues:
    """The queues of the connections with local or remote `port`."""
    waiting = [
        queues.partition(":")
        for local, remote, queues in _connections(tables)
        if port in (local, remote)
    ]
    return Queues(
        unsent_bytes=sum(int(unsent, 16) for unsent, _, _ in waiting),
        unread_bytes=sum(int(unread, 16) for _, _, unread in waiting),
    )


def _connections(tables: str) -> list[tuple[int, int, str]]:
    """Local port, remote port, and "SEND:RECEIVE" queues of every connection.

    If others come and go while the table is read, the kernel may list one twice.
    """
    rows = [line.split() for line in tables.splitlines()]
    states = {(row[1], row[2]): row[4] for row in rows if len(row) > 4 and row[3] == ESTABLISHED}
    return [(_port(local), _port(remote), queues) for (local, remote), queues in states.items()]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _as_in_proc(address: str) -> str | None:
    """Four-byte words in host byte order, as hex digits; None for a name."""
    try:
        packed = ipaddress.ip_address(address).packed
    except ValueError:
        return None
    return "".join(packed[i : i + 4][::-1].hex() for i in range(0, len(packed), 4)).upper()
