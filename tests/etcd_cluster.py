"""A real etcd cluster on loopback, whose members can be killed, stopped and started again."""

import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1"


def etcd() -> Path:
    return Path(os.environ["VMCKPT_TEST_ETCD"])


@dataclass(frozen=True, slots=True)
class Papers:
    """Files (PEM) by which a member and its clients know one another."""

    authority: Path
    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority)
        context.load_cert_chain(self.certificate, self.key)
        return context


class Member:
    """One member; its data outlive it. Clients have to show `papers` of its authority, if any."""

    def __init__(
        self,
        name: str,
        folder: Path,
        ports: Sequence[int],
        papers: Papers | None = None,
        *,
        address: str = LOOPBACK,
        options: Sequence[str] = (),
    ) -> None:
        self._options = options
        client_port, peer_port = ports
        self.name, self._folder, self._papers = name, folder, papers
        self.url = f"{'https' if papers else 'http'}://{address}:{client_port}"
        self.port, self.peer_url = client_port, f"http://127.0.0.1:{peer_port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, peers: str) -> None:
        argv = [
            str(etcd()), "--name", self.name, "--data-dir", str(self._folder / self.name),
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url,
            "--initial-cluster", peers, "--initial-cluster-token", self._folder.name,
            "--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "error",
            *self._options,
        ]  # fmt: skip
        if (papers := self._papers) is not None:
            argv += ["--cert-file", str(papers.certificate), "--key-file", str(papers.key)]
            argv += ["--client-cert-auth", "--trusted-ca-file", str(papers.authority)]
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def is_up(self) -> bool:
        """Whether it runs, with a majority or without."""
        return self._process is not None and self._process.poll() is None

    def is_healthy(self) -> bool:
        """Whether it takes part in a majority."""
        try:
            tls = self._papers.context() if self._papers else None
            health = f"{self.url}/health"
            with urllib.request.urlopen(health, timeout=1.0, context=tls) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False


class Cluster:
    """Some members."""

    def __init__(
        self,
        folder: Path,
        size: int,
        papers: Papers | None,
        *,
        address: str,
        options: Sequence[str] = (),
    ) -> None:
        ports = free_ports(2 * size, address)
        self.members = [
            Member(
                f"m{n}",
                folder,
                ports[2 * n : 2 * n + 2],
                papers,
                address=address,
                options=options,
            )
            for n in range(size)
        ]
        self._peers = ",".join(f"{member.name}={member.peer_url}" for member in self.members)

    @property
    def urls(self) -> list[str]:
        return [member.url for member in self.members]

    def start(self) -> None:
        for member in self.members:
            member.start(self._peers)
        self.wait()

    def restart(self, member: Member) -> None:
        member.start(self._peers)

    def wait(self) -> None:
        """Until every member takes part."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not all(member.is_healthy() for member in self.members):
            assert time.monotonic() < deadline_s, "etcd has not come up"
            time.sleep(0.05)

    @contextmanager
    def without(self, *members: Member) -> Iterator[None]:
        """The members are killed for the block; then all is as it was."""
        for member in members:
            member.kill()
        try:
            yield
        finally:
            for member in members:
                self.restart(member)
            self.wait()

    @contextmanager
    def stopped(self, *members: Member) -> Iterator[None]:
        """The members are paused for the block; then all is as it was."""
        for member in members:
            member.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for member in members:
                member.signal(signal.SIGCONT)
            self.wait()

    def leader(self) -> Member:
        """The member that leads now."""
        for member in self.members:
            with urllib.request.urlopen(f"{member.url}/metrics", timeout=5.0) as answer:
                if b"\netcd_server_is_leader 1" in answer.read():
                    return member
        raise AssertionError("no member leads")


@contextmanager
def running(
    folder: Path,
    size: int = 3,
    papers: Papers | None = None,
    address: str = LOOPBACK,
    options: Sequence[str] = (),
) -> Iterator[Cluster]:
    """A cluster whose clients reach it at an address of this machine."""
    cluster = Cluster(folder, size, papers, address=address, options=options)
    with ExitStack() as undo:
        for member in cluster.members:
            undo.callback(member.kill)
        cluster.start()
        yield cluster


def free_ports(count: int, address: str = LOOPBACK) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((address, 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]
