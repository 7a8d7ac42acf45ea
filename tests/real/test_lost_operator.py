"""The operator is away in the middle of a migration between two hosts: they do not wait."""

import asyncio

from tests.qemu.world import eventually, image, loaded
from tests.real.machines import Machines
from vmckpt.lab.labguest import LabGuest

AWAY_S = 20.0


def test_the_operators_cable_is_pulled_for_20_s(real_lab: Machines) -> None:
    """The guest loses nothing, the command comes back, and `runs attach` shows the same again."""
    guest = LabGuest("web", 1, image())
    real_lab.run_guest(guest, "lab-a")
    records = real_lab.folder("lab-a") / "state/jobs"

    async def main() -> None:
        async with loaded(real_lab, guest):
            words = ["migrate", "web", "lab-b", "--tls", "psk", "--bandwidth", "60MB"]
            running = real_lab.begin(*words)
            await asyncio.to_thread(
                eventually, lambda: list(records.glob("*/events.jsonl")), 60, "the job tells"
            )
            await asyncio.to_thread(real_lab.operator_link, up=False)
            try:
                await asyncio.sleep(AWAY_S)
                # Long done, and nobody was there to see it.
                assert list(records.glob("*/result.json"))
            finally:
                await asyncio.to_thread(real_lab.operator_link, up=True)
            stdout, stderr = await asyncio.to_thread(running.communicate, timeout=60)
            assert running.returncode == 0, stderr
            assert '"outcome": "completed"' in stdout

    asyncio.run(main())
    [run] = [path.name for path in records.iterdir()]
    assert real_lab.ok("runs", "attach", run)["outcome"] == "completed"
    assert real_lab.ok("vm", "show", "web")["host"] == "lab-b"
    assert len(real_lab.qemus("web")) == 1
