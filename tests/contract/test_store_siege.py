"""Two writers and a gc from hosts of their own, killed at random, answers of the store lost."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lossy_http import Losses, lossy_proxy
from tests.object_storage import environment, new_location, s3_server
from tests.store_siege import LOST_RATIO, Outcome, Siege
from vmckpt.store.files.config import allow_bundles
from vmckpt.store.open import create_store

KILLS = [3, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(7200)])]


def report(outcome: Outcome, capsys: pytest.CaptureFixture[str], more: str = "") -> None:
    with capsys.disabled():
        if outcome.kills > 100:
            print(f"\n{outcome}{more}")
    assert outcome.made > 0
    assert outcome.kills > 0


@pytest.mark.parametrize("kills", KILLS)
def test_a_shared_directory(tmp_path: Path, kills: int, capsys: pytest.CaptureFixture[str]) -> None:
    location, logs = tmp_path / "store", tmp_path / "logs"
    logs.mkdir()
    with create_store(str(location)) as store:
        allow_bundles(store.opened.backend)
    report(Siege(str(location), logs, 1, {}).run(kills, look_every=25, most_s=0.3), capsys)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Losses]:
    losses = Losses(1, LOST_RATIO)
    with (
        s3_server(tmp_path) as url,
        lossy_proxy(int(url.rpartition(":")[2]), losses) as proxy,
    ):
        for name, value in environment(proxy).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("VMCKPT_CACHE_DIR", str(tmp_path / "cache"))
        yield losses


@pytest.mark.parametrize("kills", KILLS)
def test_object_storage(
    tmp_path: Path, kills: int, bucket: Losses, capsys: pytest.CaptureFixture[str]
) -> None:
    location, logs = new_location(), tmp_path / "logs"
    logs.mkdir()
    with create_store(location) as store:
        allow_bundles(store.opened.backend)
    siege = Siege(location, logs, 1, environment(os.environ["AWS_ENDPOINT_URL"]))
    outcome = siege.run(kills, look_every=50, most_s=0.4)
    report(outcome, capsys, f"; answers lost: {bucket.done} done, {bucket.undone} not done")
