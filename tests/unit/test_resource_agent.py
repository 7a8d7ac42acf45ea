"""What the resource agent says about itself, as the cluster manager's DTD wants it."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from cluster.ocf_vm import ADVICE, PARAMETERS

ROOT = Path(__file__).parents[2]


def test_its_description() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "cluster/ocf_vm.py"), "meta-data"],
        env={}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    agent = ElementTree.fromstring(done.stdout)
    # <!ELEMENT resource-agent (version, longdesc, shortdesc, parameters, actions, special?)>
    assert (agent.tag, agent.attrib) == ("resource-agent", {"name": "vm", "version": "1.0"})
    assert [one.tag for one in agent] == [
        "version",
        "longdesc",
        "shortdesc",
        "parameters",
        "actions",
    ]
    for one in agent.findall("parameters/parameter"):
        assert set(one.attrib) == {"name", "unique", "required"}
        # <!ELEMENT parameter (longdesc, shortdesc, content)>
        assert [part.tag for part in one] == ["longdesc", "shortdesc", "content"]
        assert all(part.text for part in one[:2])
        assert one[2].attrib.keys() <= {"type", "default"}
    assert [one.get("name") for one in agent.findall("parameters/parameter")] == [*PARAMETERS]
    for one in agent.findall("actions/action"):
        assert set(one.attrib) <= {"name", "timeout", "interval", "depth"}
        assert re.fullmatch(r"\d+s", one.attrib["timeout"])
    assert [one.get("name") for one in agent.findall("actions/action")] == [*ADVICE]


def test_the_package_installs_it_where_cluster_managers_look() -> None:
    rules = (ROOT / "debian/rules").read_text()
    assert "cluster/ocf_vm.py $(STAGE)/usr/lib/ocf/resource.d/vmckpt/vm\n" in rules


def test_its_parameters_are_documented() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    table = page.partition("\n| parameter | |\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*PARAMETERS]
