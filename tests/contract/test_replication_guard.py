"""A guard that dies beside a protected VM says why."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.process import identify
from vmckpt.replicate.primary import _guarded
from vmckpt.replicate.request import Files
from vmckpt.vm.argv import Platform
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.spec import parse_spec
from vmckpt.vm.start import Qemu

pytestmark = pytest.mark.contract


def test_it_says_what_it_died_of(tmp_path: Path) -> None:
    itself = identify(os.getpid())
    assert itself
    directory, files = vm_dir(tmp_path, "web"), Files(tmp_path)
    spec = parse_spec('name = "web"\nmemory = "32M"\n', "test", tmp_path)
    qemu = Qemu(directory.qemu("0"), itself, Platform("q35", "tcg", "qemu64"))
    vm = Vm(spec, LocalHost("a", tmp_path, "127.0.0.1"), directory, qemu)
    with _guarded(vm, files) as tell:  # there is no monitor
        assert "No such file" in _last_words(tell)


def _last_words(tell: Callable[[str], None]) -> str:
    given_up_s = time.monotonic() + 30
    while time.monotonic() < given_up_s:
        try:
            tell("inf")
        except OSError as exc:
            return str(exc.strerror)
        time.sleep(0.02)
    return "it lives"
