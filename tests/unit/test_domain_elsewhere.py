"""A domain is not migrated to the host that it is on."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from vmckpt.errors import RefusedError
from vmckpt.hosts.local import LocalHost
from vmckpt.preflight.domains.checks import require_elsewhere
from vmckpt.vm.domains.inventory import Domain

pytestmark = pytest.mark.unit


def test_a_migration_to_its_own_host_is_refused_before_its_lock_is_taken() -> None:
    """Taken once for each end, it was held "by migrate" itself."""
    here, there = (LocalHost(name, Path("/"), "127.0.0.1") for name in "ab")
    domain = cast("Domain", SimpleNamespace(name="web", host=here))
    require_elsewhere(domain, there)
    with pytest.raises(RefusedError) as refused:
        require_elsewhere(domain, here)
    assert "[same-host] the VM is on a already" in refused.value.why
