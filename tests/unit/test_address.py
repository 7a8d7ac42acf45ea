"""IPv6 addresses have colons of their own: in every URI they stand in brackets."""

from pathlib import Path

import pytest

from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.steps.listen import uri
from vmckpt.options.migration import Tls
from vmckpt.preflight.domains.link import TLS_PORT, Transports, decide_link

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("address", "written"), [("fd00::2", "[fd00::2]"), ("10.0.0.2",) * 2])
def test_an_address_is_told_from_its_port(address: str, written: str) -> None:
    target = LocalHost("b", Path("/s"), address)
    assert uri(target, 4444) == f"tcp:{written}:4444"
    transports = Transports(frozenset({TLS_PORT}), "", one_machine=False)
    assert decide_link(Tls.AUTO, transports, "a", target).uri == f"qemu+tls://{written}/system"
