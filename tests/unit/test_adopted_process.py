"""Which process was adopted stands in a file of its own."""

import asyncio
from pathlib import Path

import pytest

from vmckpt.errors import StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.start import foreign_process

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"pid": "x", "start_ticks": 1}', "null"])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    files = vm_dir(tmp_path, "web").qemu("12345678")
    files.path.mkdir(parents=True)
    files.process.write_text(text)
    with pytest.raises(StorageError) as caught:
        asyncio.run(foreign_process(LocalHost("a", tmp_path, "::1"), files))
    assert str(files.process) in caught.value.what
    assert "start_ticks" in caught.value.remedy
