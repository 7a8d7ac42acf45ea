"""The image of the operator's side is built from a bare Debian 13, and runs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages.roots import REPOSITORY, TIMEOUT_S, bootstrap, package
from tests.role.commands import output
from vmckpt import __version__

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[list[str]]:
    """buildah, with images and containers of its own."""
    folders = ["--root", str(tmp_path / "images"), "--runroot", str(tmp_path / "containers")]
    buildah = ["buildah", *folders, "--storage-driver", "vfs"]
    yield buildah
    output([*buildah, "rm", "--all"])
    output([*buildah, "rmi", "--all"])


def test_the_image_runs(storage: list[str], tmp_path: Path) -> None:
    def buildah(*words: str) -> str:
        return output([*storage, *words], timeout_s=TIMEOUT_S).strip()

    root = tmp_path / "root.tar"
    bootstrap("trixie", root)
    empty = buildah("from", "scratch")
    buildah("add", empty, str(root), "/")
    root.unlink()
    buildah("commit", "--rm", empty, "base")
    base = ["--pull-never", "--build-arg", "BASE=localhost/base"]
    recipe = ["--file", str(REPOSITORY / "Containerfile"), str(package().parent)]
    buildah("build", "--isolation", "chroot", *base, "--tag", "vmckpt", *recipe)
    config = json.loads(buildah("inspect", "--type", "image", "localhost/vmckpt"))["OCIv1"][
        "config"
    ]
    container = buildah("from", "--pull-never", "localhost/vmckpt")
    run = ["run", "--isolation", "chroot", container, "--", *config["Entrypoint"]]
    assert buildah(*run, "--version") == f"vmckpt {__version__}"
    assert json.loads(buildah(*run, "vm", "list", "--json"))["vms"] == []
