"""What debian/ repeats from elsewhere is the same there."""

import re
from pathlib import Path

import pytest

from vmckpt import __version__

pytestmark = pytest.mark.unit
REPOSITORY = Path(__file__).parents[2]


def found(pattern: str, file: str) -> tuple[str, ...]:
    match = re.search(pattern, (REPOSITORY / file).read_text(), re.MULTILINE)
    assert match
    return match.groups()


def test_the_version_is_vmckpts() -> None:
    assert found(r"\Avmckpt \((\S+)\) ", "debian/changelog") == (__version__,)


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_pages_name_the_package_of_this_version(page: str) -> None:
    named = set(re.findall(r"vmckpt_([\d.]+)_\w+\.deb", (REPOSITORY / page).read_text()))
    assert named == {__version__}


def test_it_depends_on_the_pythons_that_it_has_wheels_for() -> None:
    (versions,) = found(r"^WHEELS_FOR \?= (.*)$", "Makefile")
    first, *_, last = (int(version.removeprefix("3.")) for version in versions.split())
    depends = r"python3 \(>= 3\.(\d+)\), python3 \(<< 3\.(\d+)\)"
    assert found(depends, "debian/control") == (str(first), str(last + 1))


def test_its_wheels_are_those_of_make_wheels() -> None:
    (portable,) = found(r"(--platform manylinux.*) \\$", "Makefile")
    here = found(r"(--platform manylinux.*)$", "debian/rules")[0]
    assert portable.replace("$$(uname -m)", "$(DEB_HOST_GNU_CPU)") == here
