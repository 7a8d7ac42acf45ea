"""A domain that arrives under another name, or as its XML for the target says."""

from pathlib import Path

import pytest

from vmckpt.hosts.local import LocalHost
from vmckpt.options.migration import AtTarget
from vmckpt.preflight.domains.arrival import arrival_checks, arriving, disks_elsewhere
from vmckpt.preflight.finding import REFUSE, WARN
from vmckpt.vm.domains.definition.description import parse_domain
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.replies import DomainInfo

pytestmark = pytest.mark.unit
UUID = "00000000-0000-0000-0000-000000000001"
XML = f"""<domain type='kvm'><name>web</name><uuid>{UUID}</uuid><os><type>hvm</type></os><devices>
<disk type='file'><source file='/here/web.qcow2'/><target dev='vda'/></disk>
<interface type='bridge'><source bridge='br0'/></interface></devices></domain>"""
THERE = XML.replace("/here/", "/there/").replace("br0", "br1")


def domain(*, persistent: bool = True, state: DomainState = DomainState.RUNNING) -> Domain:
    seen = DomainInfo(UUID, "web", state, 1, persistent, XML)
    return Domain(LocalHost("a", Path("/"), "::1"), seen, parse_domain(XML))


def test_it_is_what_it_was_unless_something_else_is_said() -> None:
    assert arriving(domain(), None) == domain()
    only_name = arriving(domain(), AtTarget(name="web2"))
    assert (only_name.name, only_name.uuid, only_name.description) == (
        "web2", UUID, domain().description,
    )  # fmt: skip


def test_its_xml_says_where_its_disks_and_networks_are() -> None:
    there = arriving(domain(), AtTarget(xml=THERE))
    assert there.name == "web"
    assert there.description.interfaces[0].source == "br1"
    assert disks_elsewhere(there) == {"vda": Path("/there/web.qcow2")}
    assert disks_elsewhere(domain()) == {"vda": Path("/here/web.qcow2")}


def test_another_domains_xml_is_refused() -> None:
    other = THERE.replace(UUID, UUID[:-1] + "2")
    for there in (AtTarget(xml=other, persistent_xml=THERE), AtTarget(persistent_xml=other)):
        [no] = arrival_checks(domain(), there)
        assert (no.code, no.verdict, UUID[:-1] + "2" in no.reason) == ("domain-xml", REFUSE, True)


def test_what_holds_only_while_it_runs_is_said() -> None:
    [warned] = arrival_checks(domain(), AtTarget(xml=THERE))
    assert (warned.verdict, "--persistent-xml" in warned.remedy) == (WARN, True)
    assert not list(arrival_checks(domain(), AtTarget(xml=THERE, persistent_xml=THERE)))
    assert not list(arrival_checks(domain(), AtTarget(name="web2", graphics_uri="vnc://b")))
    assert not list(arrival_checks(domain(), None))
    # Of one that is off libvirt keeps what --xml says.
    assert not list(arrival_checks(domain(state=DomainState.SHUTOFF), AtTarget(xml=THERE)))
    transient = domain(persistent=False)
    assert not list(arrival_checks(transient, AtTarget(xml=THERE)))
    [refused] = arrival_checks(transient, AtTarget(persistent_xml=THERE))
    assert refused.verdict == REFUSE
