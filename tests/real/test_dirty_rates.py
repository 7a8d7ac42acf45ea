"""Dirty rates of VMs elsewhere and of libvirt's domains, and what metrics say of them."""

import asyncio
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.qemu.world import COMMAND, image
from tests.real.domains import GUEST, MEMORY, remove_domain, run_domain
from tests.real.machines import Machines
from vmckpt.lab.guests.labguest import LabGuest

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(300)]
MIB = 1 << 20
NAME = GUEST.name
LOAD = "rate=20M set=32M pattern=sequential content=text"
# A node and the graphics card have as much memory each.
TWO_NODES = """<numa><cell id='0' cpus='0' memory='64' unit='MiB'/>
<cell id='1' memory='128' unit='MiB'/></numa>"""
CARD = "<video><model type='vga' vram='65536'/></video>"


def test_they_are_measured_where_they_are_by_the_best_there_is(real_lab: Machines) -> None:
    own = LabGuest("one", 1, image(), disk=None)
    try:
        real_lab.run_guest(own, "lab-a")
        run_domain(real_lab, "lab-b")
        for guest in (own, GUEST):
            asyncio.run(load(real_lab, guest))

        for guest in (own, GUEST):
            tracked = real_lab.ok("dirty-rate", guest.name, "--for", "3s")
            assert (tracked["source"], tracked["why"]) == ("page-tracking", "")
            assert 0.8 * 32 * MIB < tracked["working_set_bytes"] < 64 * MIB
            assert tracked["dirtied"]["compressible"] > 0.5
            assert tracked["ram"]["zero"] > 0.2
        log = f"/var/log/libvirt/qemu/{NAME}.log"
        assert real_lab.inside("lab-b", "grep", "-c", "custom-monitor", log).stdout.strip() == "0"

        real_lab.virsh("lab-b", "suspend", NAME)
        stopped = real_lab.vmckpt("dirty-rate", NAME)
        assert (stopped.code, stopped.error["why"]) == (4, "it is paused: it dirties no memory")

        rates = {
            sample.labels["vm"]: sample.value
            for metric in text_string_to_metric_families(metrics(real_lab))
            for sample in metric.samples
            if sample.name == "vmckpt_vm_dirty_rate_bytes_per_second"
        }
        assert rates.keys() == {"one", "dom"}
        assert all(10 * MIB < rate < 40 * MIB for rate in rates.values())
    finally:
        remove_domain(real_lab)


def test_a_domain_whose_memory_is_not_told_apart_is_sampled_by_libvirt(
    real_lab: Machines,
) -> None:
    try:
        run_domain(real_lab, "lab-b", devices=CARD, memory=MEMORY._replace(nodes=TWO_NODES))
        asyncio.run(load(real_lab, GUEST))
        sampled = real_lab.ok("dirty-rate", "dom", "--for", "2s")
        assert sampled["source"] == "libvirt-page-sampling"
        assert "in pieces" in sampled["why"]
        assert "512 pages" in sampled["why"]
        (length_s, _, pages, _) = sampled["curve"]["points"][0]
        assert length_s == 1
        assert 2 * MIB < 4096 * pages < 100 * MIB
    finally:
        remove_domain(real_lab)


async def load(machines: Machines, guest: LabGuest) -> None:
    control = await guest.control(machines.lab)
    await control.load_memory(LOAD)
    await control.close()


def metrics(machines: Machines) -> str:
    done = subprocess.run(
        [*COMMAND, "metrics"],
        env=machines.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
