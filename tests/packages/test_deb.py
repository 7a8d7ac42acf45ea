"""The Debian package in a bare root of each release: installed, used, upgraded and removed."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages.roots import REPOSITORY, Root, bootstrap, package
from vmckpt import __version__

# A root takes a minute, and its packages another, on a quiet machine.
pytestmark = pytest.mark.timeout(1200)
PYTHON_OF = {"bookworm": [3, 11], "trixie": [3, 13]}
ENVIRONMENT = "/usr/lib/vmckpt/bin/python3"
IMPORTS = """\
import json, sys
import blake3, cryptography, libvirt, libvirt_qemu, msgspec
import numpy, obstore, paramiko, qemu.qmp, zstandard
print(json.dumps(sys.version_info[:2]))
"""
COMPLETE = """\
. /usr/share/bash-completion/completions/vmckpt
COMP_WORDS=(vmckpt vm l) COMP_CWORD=2
_vmckpt_completion vmckpt
echo "${COMPREPLY[*]}"
"""
# A far side of a connection waits for its standard input, as long as the test wants.
BUSY = f"""\
mkfifo /tmp/wait
{ENVIRONMENT} -m vmckpt.cli.entry serve </tmp/wait >/dev/null &
exec 3>/tmp/wait
for command in 'dpkg --install /vmckpt.deb' 'dpkg --remove vmckpt'; do
    $command 2>&1 | grep 'its jobs or replications run here'
done
exec 3>&-
wait
dpkg --install /vmckpt.deb
"""


def files(root: Root) -> set[str]:
    """All files with vmckpt in their names, but the package and what man rendered."""
    others = ["-path", "/proc", "-o", "-path", "/var/cache/man", "-o", "-path", "/vmckpt.deb"]
    wanted = ["-name", "*vmckpt*", "-print"]
    return set(root.run("find", "/", "(", *others, ")", "-prune", "-o", *wanted).splitlines())


@pytest.fixture(scope="module", params=PYTHON_OF)
def root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Root]:
    """A release of Debian with apt and man, in which the package is installed."""
    release: str = request.param
    path = tmp_path_factory.mktemp(release)
    made = Root(path, release)
    try:
        bootstrap(release, path, "--include=man-db")
        assert files(made) == set()
        shutil.copy(package(), path / "vmckpt.deb")
        made.install("/vmckpt.deb")
        yield made
    finally:
        shutil.rmtree(path)


def test_it_starts(root: Root) -> None:
    assert root.run("vmckpt", "--version") == f"vmckpt {__version__}\n"
    assert "Migrate a VM to another host." in root.run("vmckpt", "--help")
    assert json.loads(root.run("vmckpt", "vm", "list", "--json"))["vms"] == []


def test_its_libraries_are_for_this_python(root: Root) -> None:
    assert json.loads(root.run(ENVIRONMENT, "-c", IMPORTS)) == PYTHON_OF[root.release]


def test_it_has_manuals_completion_and_units(root: Root) -> None:
    assert (
        root.run("man", "-w", "vmckpt", "vmckpt-migrate", "vmckpt-fence-by-kill").count(".1.gz")
        == 3
    )
    assert "Maximum downtime" in root.run("man", "vmckpt-migrate")
    assert root.run("bash", "-c", COMPLETE) == "list\n"
    share = root.path / "usr/share"
    zsh = (share / "zsh/vendor-completions/_vmckpt").read_text().strip().splitlines()
    assert (zsh[0], zsh[-1]) == ("#compdef vmckpt", '_vmckpt_completion "$@"')
    assert (
        "complete --command vmckpt" in (share / "fish/vendor_completions.d/vmckpt.fish").read_text()
    )
    units = {unit.name for unit in (REPOSITORY / "units").rglob("*") if unit.is_file()}
    assert {Path(file).name for file in files(root) if "/usr/lib/systemd/system/" in file} == units


def test_it_has_a_resource_agent(root: Root) -> None:
    described = root.run("/usr/lib/ocf/resource.d/vmckpt/vm", "meta-data")
    assert '<resource-agent name="vm" version="1.0">' in described


def test_it_is_not_replaced_while_its_jobs_run(root: Root) -> None:
    root.run("bash", "-euc", BUSY)
    assert root.run("vmckpt", "--version") == f"vmckpt {__version__}\n"


def test_it_leaves_nothing(root: Root) -> None:
    root.run("apt-get", "purge", "--yes", "vmckpt")
    assert files(root) == set()
