"""What is refused for libvirt domains names what to use instead, by commands that exist."""

import re
from typing import get_args

import pytest

from tests.contract.test_domain_plan import SEEN
from tests.unit.test_command_lines import parse, words_of
from vmckpt.drivers.domain import LibvirtDomain, OwnOnly, not_for_domains
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains.inventory import as_domain

pytestmark = pytest.mark.unit
COMMAND = re.compile(r"vmckpt [^;,]+?(?=$|[;,])")


@pytest.fixture
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return LocalHost("h1", tmp_path_factory.getbasetemp(), "::1")


@pytest.mark.parametrize("use", get_args(OwnOnly))
def test_each_says_why_and_what_to_use(host: Host, use: OwnOnly) -> None:
    error = not_for_domains(LibvirtDomain(as_domain(host, SEEN)), use)
    assert error.what == "'web' is a libvirt domain"
    found = COMMAND.findall(error.remedy)
    for command in found:
        parse(words_of(command.removeprefix("vmckpt ")))
    assert found or error.remedy.startswith("on h1: virsh ")
    assert "web" in error.remedy
    assert "vmckpt" in error.why or "libvirt" in error.why or "domain" in error.why
