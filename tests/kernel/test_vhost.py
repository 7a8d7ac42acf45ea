"""vhost-net: the host's kernel writes the guest's memory, and its writes are seen like QEMU's.

The machine runs Debian 13's kernel, which has PAGEMAP_SCAN and vhost-net; vhost_inside.py runs
in it.
"""

import os
from pathlib import Path

import pytest

from tests import nested

FACTS = ("the tracker has seen all that vhost wrote", "a stopped guest is not written")


@pytest.mark.timeout(nested.LIMIT_S + 300)
def test_what_vhost_writes_is_seen(tmp_path: Path) -> None:
    kernel = Path(os.environ["VMCKPT_TEST_KERNEL"])
    wrote, _ = nested.facts(
        tmp_path, "tests.kernel.vhost_inside", "-cpu", "Nehalem", wanted=FACTS, kernel=kernel
    )
    assert wrote["packets_in_changed_pages"] > 100
    assert wrote["missed_pages"] == 0
