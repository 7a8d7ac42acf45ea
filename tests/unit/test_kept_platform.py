"""What an edited spec does not touch keeps the values that it was given when it first started."""

from pathlib import Path

import pytest

from vmckpt.vm.create import kept_platform
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import Spec, parse_spec

pytestmark = pytest.mark.unit

OLD = Platform("pc-q35-7.2", "tcg", "qemu64")
OFFERED = Platform("pc-q35-10.0", "kvm", "host")


def spec(**keys: str) -> Spec:
    given = {"name": "web", "memory": "64M"} | keys
    text = "".join(f'{key} = "{value}"\n' for key, value in given.items())
    return parse_spec(text, "spec", Path("/"))


@pytest.mark.parametrize(
    ("edited", "expected"),
    [
        ({"memory": "128M"}, OLD),
        ({"machine": "pc-q35-10.0"}, Platform("pc-q35-10.0", "tcg", "qemu64")),
        ({"cpu": "max"}, Platform("pc-q35-7.2", "tcg", "host")),
        ({"accel": "kvm"}, Platform("pc-q35-7.2", "kvm", "host")),
    ],
)
def test_only_what_was_edited_is_resolved_again(edited: dict[str, str], expected: Platform) -> None:
    assert kept_platform(spec(), OLD, spec(**edited), OFFERED) == expected
