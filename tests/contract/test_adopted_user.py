"""Whose QEMU may be adopted: what it names is opened with vmckpt's rights from then on."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from vmckpt.errors import RefusedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.process import identify
from vmckpt.vm.adopted.adopt import require_own_user

NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_qemu_is_adopted_only_if_it_is_trusted(tmp_path: Path) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    asyncio.run(require_own_user(host, identify(os.getpid())))  # type: ignore[arg-type]
    argv = ["setpriv", f"--ruid={NOBODY}", "--", "cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as theirs:
        assert theirs.stdin
        assert theirs.stdout
        theirs.stdin.write(b"x")
        theirs.stdin.flush()
        theirs.stdout.read(1)  # it is `cat` by now
        process = identify(theirs.pid)
        assert process
        with pytest.raises(RefusedError) as refused:
            asyncio.run(require_own_user(host, process))
        theirs.stdin.close()
    assert f"uid {NOBODY}" in refused.value.what
    assert "--trust" in refused.value.remedy
