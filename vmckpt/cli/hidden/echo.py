"""vmckpt echo: what a migration runs on a VM's host, to see from outside when it is silent."""

import json
import signal
import sys
from ipaddress import IPv4Address
from pathlib import Path


def echo(interface: str, mac: str, address: str, lock: Path, run: str, out: Path) -> None:
    """Probe a guest until SIGTERM (internal).

    Prints a line when it first answers, and in the end what was seen. That goes to `out`, which is
    removed if `run` gives up the lock and so will not read it.
    """
    from vmckpt.hosts.lock import read_owner
    from vmckpt.hosts.sockets.arp import EVERY_S, watch

    ended = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    probes, looks_at, has_answered = 0, round(0.5 / EVERY_S), False

    def go_on(answers: int) -> bool:
        nonlocal probes, has_answered
        probes += 1
        if answers and not has_answered:
            has_answered = True
            print(json.dumps({"answered": True}), flush=True)
        if probes % looks_at == 0:
            owner = read_owner(lock)
            if owner is None or owner.run != run:
                out.unlink(missing_ok=True)
                raise SystemExit(0)
        return not ended

    try:
        seen = watch(interface, bytes.fromhex(mac.replace(":", "")), IPv4Address(address), go_on)
    except OSError as exc:
        print(json.dumps({"why": exc.strerror or str(exc)}))
        return
    print(json.dumps(seen._asdict()))
    sys.stdout.flush()
