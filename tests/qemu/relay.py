"""Stands in for a QEMU binary: the real one behind a relay that can spoil its monitor.

Run as the host's "qemu": it moves the operator's monitor aside, leaves a relay process at its
place, and becomes the real QEMU (same pid). The relay reads `rules.json`, where VK_RULES leads,
before each command: {"command": NAME, "of": WORD, "do": "error" | "silent" | "lie"}; one rule,
used once, for a command with that word among its arguments (if one is given). "lie" answers that it
is done, and does nothing. Run with
`--relay PUBLIC REAL RULES PARENT`, it is the relay.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

OPERATOR = "qmp.sock"
SPEAKS = threading.Lock()


def become_qemu() -> None:
    rules, qemu = os.environ["VK_RULES"], os.environ["VK_QEMU"]
    argv = list(sys.argv[1:])
    for number, word in enumerate(argv):
        if f"/{OPERATOR}," in word and word.startswith("socket,"):
            public = word.partition("path=")[2].partition(",")[0]
            real = public.replace(OPERATOR, "real.sock")
            argv[number] = word.replace(public, real)
            words = ["--relay", public, real, rules, str(os.getpid())]
            subprocess.Popen([sys.executable, __file__, *words], start_new_session=True)
    os.execv(qemu, [qemu, *argv])


def relay(public: str, real: str, rules: Path, parent: int) -> None:
    while not Path(real).exists():
        if not Path(f"/proc/{parent}").exists():
            return
        time.sleep(0.002)
    server = socket.socket(socket.AF_UNIX)
    server.bind(public)
    server.listen(8)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    while True:
        client, _ = server.accept()
        qemu = socket.socket(socket.AF_UNIX)
        try:
            qemu.connect(real)
        except OSError:
            client.close()
            continue
        back = threading.Thread(target=copy, args=(qemu, client), daemon=True)
        back.start()
        # Like QEMU, one client at a time.
        forward(client, qemu, rules)
        back.join()


def end_with(parent: int) -> None:
    pidfd = os.pidfd_open(parent)
    select.select([pidfd], [], [])
    os._exit(0)


def copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        for line in source.makefile("rb"):
            with SPEAKS:  # whole lines only: what `spoil` says must not come amid one
                sink.sendall(line)
    hang_up(source, sink)


def forward(client: socket.socket, qemu: socket.socket, rules: Path) -> None:
    # Commands end where their JSON ends: clients send no line ends.
    decoder, text = json.JSONDecoder(), ""
    with suppress(OSError):
        while data := client.recv(65536):
            text += data.decode()
            while text := text.lstrip():
                try:
                    message, end = decoder.raw_decode(text)
                except ValueError:
                    break
                if not spoil(message, client, rules):
                    qemu.sendall(text[:end].encode())
                text = text[end:]
    hang_up(client, qemu)


def spoil(message: dict[str, Any], client: socket.socket, rules: Path) -> bool:
    """Whether this command is the rule's, and has been answered as the rule says."""
    try:
        rule = json.loads(rules.read_text())
        if rule["command"] != (message.get("execute") or message.get("exec-oob")):
            return False
        if rule.get("of", "") not in json.dumps(message.get("arguments")):
            return False
        # It may be a link that cannot be removed here.
        rules.resolve().unlink()
    except FileNotFoundError:  # the other QEMU's relay may have been faster
        return False
    error = {"class": "GenericError", "desc": "spoilt by the test"}
    answers: dict[str, Any] = {"error": {"error": error}, "lie": {"return": {}}}
    if answer := answers.get(rule["do"]):
        with SPEAKS:
            client.sendall(json.dumps(answer | {"id": message.get("id")}).encode() + b"\r\n")
    return True


def hang_up(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--relay"]:
        relay(sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
    else:
        become_qemu()
