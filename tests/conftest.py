"""A test's folder says what it may use: tests/unit, contract, qemu, real or role."""

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, however slow the machine: what fails here fails everywhere.
settings.register_profile("the same everywhere", derandomize=True, deadline=None)
settings.load_profile("the same everywhere")

KINDS = ("unit", "contract", "qemu", "real", "role")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = item.path.relative_to(HERE).parts[0]
        if kind not in KINDS:
            raise pytest.UsageError(f"{item.path}: tests live in tests/{{{','.join(KINDS)}}}/")
        item.add_marker(kind)
