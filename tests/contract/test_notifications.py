"""Notifications reach their receivers, or are recorded, whatever the receivers do."""

import asyncio
import http.server
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.commands import COMMAND, vmckpt
from tests.schedule_world import World
from tests.waiting import eventually
from vmckpt.fleet.schedule.notices import occasion_of
from vmckpt.fleet.schedule.record import add, new_record, save
from vmckpt.fleet.schedule.request import ScheduleRequest, When
from vmckpt.fleet.schedule.run import Event, clock
from vmckpt.hosts.processes.process import find_by_argument
from vmckpt.notify import delivery
from vmckpt.notify.delivery import Receivers, deliver
from vmckpt.notify.notification import Notification, Occasion

pytestmark = pytest.mark.contract
FAILOVER = Notification.now(
    Occasion.FAILOVER, about="r1", vm="web", host="b", why="took over from a at epoch 7"
)
SOON = (0.01, 0.01)


class Web(http.server.ThreadingHTTPServer):
    """Answers with these statuses in turn, the last one from then on; keeps what it was sent."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses, self.got = list(statuses), list[dict[str, Any]]()
        self.wait_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?token=t%20t"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Web

    def do_POST(self) -> None:
        assert self.path == "/hook?token=t%20t"
        assert self.headers["Content-Type"] == "application/json"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))
        time.sleep(self.server.wait_s)
        status = self.server.statuses[0]
        if len(self.server.statuses) > 1:
            self.server.statuses.pop(0)
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web(*statuses: int) -> Iterator[Web]:
    with Web(*statuses) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()


def delivered(**to: Any) -> dict[str, str]:
    receivers = Receivers.parse(to.get("command"), to.get("webhook"), [])
    return asyncio.run(deliver(FAILOVER, receivers, waits_s=SOON))


@pytest.mark.parametrize(
    ("statuses", "posts", "why"),
    [
        ((204,), 1, None),
        ((500, 503, 200), 3, None),
        ((429, 200), 2, None),
        ((500,), 3, "HTTP 500 Internal Server Error (3 attempts)"),
        # No further attempt changes these.
        ((404,), 1, "HTTP 404 Not Found"),
        ((302,), 1, "HTTP 302 Found"),
    ],
)
def test_a_webhook_is_tried_as_often_as_it_makes_sense(
    statuses: tuple[int, ...], posts: int, why: str | None
) -> None:
    with web(*statuses) as server:
        assert delivered(webhook=server.url) == ({"webhook": why} if why else {})
        assert server.got == [json.loads(FAILOVER.to_text())] * posts


def test_a_server_that_is_slow_or_gone_takes_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "TIMEOUT_S", 0.2)
    with web(200) as server:
        server.wait_s = 1.0
        began_s = time.monotonic()
        assert delivered(webhook=server.url) == {"webhook": "no end within 0.2 s (3 attempts)"}
        assert time.monotonic() - began_s < 1.5
        url = server.url
    reason = delivered(webhook=url)["webhook"]
    assert reason == "no answer from the server: Connection refused (3 attempts)"
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/"
        assert "no end within" in delivered(webhook=url)["webhook"]
        assert "no TLS" in delivered(webhook=f"https{plain(mute)}")["webhook"]


def plain(mute: socket.socket) -> str:
    """The rest of the URL of a server that answers a TLS handshake with something else."""

    def answer() -> None:
        for _ in range(1 + 3 + len(SOON)):
            connection, _ = mute.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    return f"://127.0.0.1:{mute.getsockname()[1]}/"


def test_a_command_gets_the_notification_on_its_input(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f'cat >{out}; echo "$VMCKPT_EVENT $VMCKPT_VM $VMCKPT_HOST" >>{out}'
    assert delivered(command=f"sh -c '{script}'") == {}
    text, words = out.read_text().splitlines()
    assert Notification.from_text(text) == FAILOVER
    assert words == "failover web b"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sh -c 'echo no >&2; echo mail >&2; exit 3'", "exit status 3: mail (3 attempts)"),
        ("/nowhere/mail", "/nowhere/mail does not start: No such file or directory (3 attempts)"),
        ("sh -c 'yes >&2'", "it printed more than"),
    ],
)
def test_a_command_that_fails_is_tried_again(command: str, why: str) -> None:
    assert why in delivered(command=command)["command"]


def test_a_command_that_does_not_end_is_killed_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "TIMEOUT_S", 0.3)
    mark = f"987{os.getpid()}"
    why = delivered(command=f"sh -c 'sleep {mark} & sleep {mark}'")["command"]
    assert why == "no end within 0.3 s (3 attempts)"
    # SIGKILL was sent to all of them; each ends when the kernel runs it next.
    eventually(lambda: find_by_argument(f"sleep\0{mark}") == [], 10, "its processes end")


def test_one_receiver_does_not_depend_on_the_other(tmp_path: Path) -> None:
    with web(500) as server:
        failures = delivered(command=f"sh -c 'cat >{tmp_path}/out'", webhook=server.url)
        assert list(failures) == ["webhook"]
        assert (tmp_path / "out").exists()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))

    def write(text: str) -> None:
        path = tmp_path / "vmckpt/config.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    return write


def undelivered(state: Path) -> list[dict[str, Any]]:
    done = vmckpt(state, "notify", "--undelivered", "--json")
    found: list[dict[str, Any]] = json.loads(done.stdout)["undelivered"]
    return found


def test_what_cannot_be_delivered_is_listed(tmp_path: Path, config: Callable[[str], None]) -> None:
    state, text = tmp_path / "state", FAILOVER.to_text()
    config('[notify]\ncommand = "/nowhere/mail"\nwebhok = "http://x/"\n')
    assert vmckpt(state, "deliver", text).returncode == 1
    config("")
    (one,) = undelivered(state)
    assert one["notification"] == json.loads(text)
    assert "has no option --webhok" in one["why"]["configuration"]
    with web(404) as server:
        config(f'[notify]\nwebhook = "{server.url}"\n')
        assert vmckpt(state, "deliver", text).returncode == 1
    assert undelivered(state)[1]["why"] == {"webhook": "HTTP 404 Not Found"}
    shown = vmckpt(state, "notify", "--undelivered").stdout
    assert "failover" in shown
    assert "HTTP 404 Not Found" in shown


def test_what_is_delivered_or_not_wanted_leaves_no_record(
    tmp_path: Path, config: Callable[[str], None]
) -> None:
    state, text = tmp_path / "state", FAILOVER.to_text()
    with web(200) as server:
        config(f'[notify]\nwebhook = "{server.url}"\nevent = ["protection-lost"]\n')
        assert vmckpt(state, "deliver", text).returncode == 0
        assert server.got == []
        config(f'[notify]\nwebhook = "{server.url}"\nevent = ["failover"]\n')
        assert vmckpt(state, "deliver", text).returncode == 0
        assert server.got == [json.loads(text)]
    assert undelivered(state) == []


def test_a_delivery_that_is_killed_stays_on_record(
    tmp_path: Path, config: Callable[[str], None]
) -> None:
    config(f"[notify]\ncommand = \"sh -c 'echo >{tmp_path}/begun; sleep 60'\"\n")
    process = subprocess.Popen([*COMMAND, "deliver", FAILOVER.to_text()])
    until((tmp_path / "begun").exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for one in find_by_argument(f"echo >{tmp_path}/begun"):
        os.killpg(one.pid, signal.SIGKILL)
    (left,) = undelivered(tmp_path / "state")
    assert left["why"] == {"delivery": "its process has not finished: it is at work, or was killed"}


def test_what_announces_neither_waits_nor_has_to_live(
    tmp_path: Path, config: Callable[[str], None]
) -> None:
    config(f"[notify]\ncommand = \"sh -c 'sleep 2; cat >{tmp_path}/out'\"\n")
    script = (
        "import os, sys, time; from vmckpt.notify.announce import announce;"
        "from vmckpt.notify.notification import Notification;"
        "one = Notification.from_text(sys.argv[1]); began_s = time.monotonic(); announce(one);"
        "print(time.monotonic() - began_s, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, FAILOVER.to_text()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert float(done.stdout) < 1.0
    until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text())
    assert Notification.from_text((tmp_path / "out").read_text()) == FAILOVER
    until(lambda: undelivered(tmp_path / "state") == [])


def test_an_announcement_that_cannot_begin_is_told_on_stderr(
    tmp_path: Path, config: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    from vmckpt.notify.announce import announce

    announce(FAILOVER)  # nothing is configured
    assert capfd.readouterr().err == ""
    config('[notify]\ncommand = "true"\n')
    (tmp_path / "state").write_text("a file\n")
    announce(FAILOVER)
    assert "no process delivers the notification" in capfd.readouterr().err


def test_the_test_notification_says_whether_receivers_are_set_up(
    tmp_path: Path, config: Callable[[str], None]
) -> None:
    state = tmp_path / "state"
    done = vmckpt(state, "notify", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["why"] == "neither a command nor a webhook is set"
    with web(200, 500) as server:
        config(f'[notify]\nwebhook = "{server.url}"\nevent = ["failover", "protected"]\n')
        done = vmckpt(state, "notify")
        assert (done.returncode, done.stdout) == (
            0,
            "delivered; events that are notified of: failover, protected\n",
        )
        assert [one["event"] for one in server.got] == ["test"]
        done = vmckpt(state, "notify")
        assert done.returncode == 1
        assert "webhook: HTTP 500" in done.stderr
    config('[notify]\ncommand = "true"\nevent = ["failovers"]\n')
    assert vmckpt(state, "notify").returncode == 2


@dataclass
class Listening(World):
    """A machine with a scheduler in virtual time, and what is notified of."""

    occasions: list[Occasion] = field(default_factory=list)

    def _told(self, event: Event) -> None:
        super()._told(event)
        if occasion := occasion_of(event):
            self.occasions.append(occasion)


def test_failures_in_a_row_are_one_notification_and_their_end_another(
    config: Callable[[str], None],
) -> None:
    asked = ScheduleRequest("web", When.EVERY, "UTC", every_s=3600.0)
    failed, again = Occasion.SCHEDULE_FAILED, Occasion.SCHEDULE_RECOVERED
    with asyncio.Runner() as runner:
        here = Listening(runner.get_loop(), random.Random(1), asked)
        assert here.work(4000.0)
        assert here.occasions == []
        here.fail_next = 5  # tries, over two runs
        assert here.work(8000.0)
        assert here.occasions == [failed, again]
        here.far = True  # it is taken, and its copy is tried until the next run is due
        assert here.work(8000.0)
        here.far = False
        assert here.work(4000.0)
        assert here.occasions == [failed, again] * 2
        here.damage.append("store is damaged")
        here.request = replace(asked, check_percent=2.0)
        save(replace(here.record, request=here.request))
        assert here.work(4000.0)
        assert Occasion.STORE_DAMAGED in here.occasions[4:]
        assert len(set(here.occasions[4:])) == 1


def test_a_scheduled_checkpoint_that_fails_is_notified_of(
    tmp_path: Path, config: Callable[[str], None]
) -> None:
    asked = ScheduleRequest("gone", When.EVERY, "UTC", every_s=3600.0)
    add(new_record("nightly", asked, clock()))
    with web(200) as server:
        config(f'[notify]\nwebhook = "{server.url}"\n')
        assert vmckpt(tmp_path / "state", "schedule", "run-due").returncode == 3
        until(lambda: server.got)
        (said,) = server.got
    assert (said["event"], said["vm"], said["host"]) == ("schedule-failed", "gone", "local")
    assert "there is no VM 'gone'" in said["why"]
    assert said["details"]["schedule"] == "nightly"
    assert said["details"]["kind"] == "not-found"


def until(holds: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
