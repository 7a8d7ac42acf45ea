"""The contract in pyproject.toml sees packages only: a folder without __init__.py would escape."""

from pathlib import Path

import vmckpt


def test_every_folder_with_code_is_a_package() -> None:
    root = Path(vmckpt.__file__).parent
    escaped = {
        file.parent.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        if not (file.parent / "__init__.py").exists()
    }
    assert not escaped
