"""Checkpoints of a domain with UEFI and an emulated TPM: their state is part of its moment."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.test_checkpoint import load as load_guest
from tests.qemu.test_checkpoint import sound
from tests.real.domains import GUEST, OWN_DISK, SCREEN, remove_domain, run_domain, states
from tests.real.machines import Machines
from vmckpt.lab.guests.labguest import LabGuest

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(600)]
COPY = "dom-2"
NVRAM = Path("/var/lib/libvirt/qemu/nvram")
FIRMWARE = f"""
<loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>
<nvram template='/usr/share/OVMF/OVMF_VARS_4M.fd'>{NVRAM}/dom_VARS.fd</nvram>"""
TPM = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>"
TPM_STATES = Path("/var/lib/libvirt/swtpm")
# What the package swtpm-tools has in /etc.
SETTINGS = {
    "swtpm_setup.conf": "create_certs_tool=/usr/bin/swtpm_localca\n"
    "create_certs_tool_config=/etc/swtpm-localca.conf\n"
    "create_certs_tool_options=/etc/swtpm-localca.options\n",
    "swtpm-localca.conf": "statedir=/var/lib/swtpm-localca\n"
    "signingkey=/var/lib/swtpm-localca/signkey.pem\n"
    "issuercert=/var/lib/swtpm-localca/issuercert.pem\n"
    "certserial=/var/lib/swtpm-localca/certserial\n",
    "swtpm-localca.options": "--platform-manufacturer Debian\n--platform-version 12\n"
    "--platform-model QEMU\n",
}


@pytest.fixture
def uefi(secured: Machines) -> Iterator[Machines]:
    made = secured
    for name, text in SETTINGS.items():
        inside(made, f"printf '%s' '{text}' >/etc/{name}")
    try:
        devices = SCREEN.format(card="virtio") + TPM
        run_domain(made, "lab-a", disk=OWN_DISK, devices=devices, firmware=FIRMWARE)
        yield made
    finally:
        for name in (COPY, GUEST.name):
            for words in (("destroy", name), ("undefine", name, "--nvram", "--tpm")):
                made.inside("lab-a", "virsh", "--connect", "qemu:///system", *words)
        remove_domain(made)
        if taken := made.ok("checkpoint", "list")["checkpoints"]:
            made.ok("checkpoint", "rm", *(one["id"] for one in taken), "--yes")
        made.inside(
            "lab-a",
            "rm",
            "-rf",
            "/var/lib/vmckpt/libvirt",
            *(f"{NVRAM}/{name}_VARS.fd" for name in (COPY, GUEST.name)),
        )


def inside(made: Machines, command: str) -> str:
    done = made.inside("lab-a", "sh", "-c", command)
    assert done.code == 0, done.stderr
    return done.stdout


def variables(made: Machines, name: str = GUEST.name) -> str:
    return inside(made, f"sha256sum <{NVRAM}/{name}_VARS.fd")


def tpm_blocks(made: Machines, name: str = GUEST.name) -> set[str]:
    """What its TPM keeps, in pieces of 32 bytes: seeds and certificates are in them."""
    uuid = made.virsh("lab-a", "domuuid", name).strip()
    dump = inside(made, f"od -An -v -tx1 -w32 {TPM_STATES}/{uuid}/tpm2/tpm2-00.permall")
    return set(dump.splitlines())


def take(made: Machines, guest: LabGuest = GUEST) -> None:
    async def run() -> None:
        control = await guest.control(made.lab)
        await load_guest(control)
        await asyncio.to_thread(made.ok, "checkpoint", "create", guest.name, "--name", "one")
        await control.close()

    asyncio.run(run())


def test_variables_and_tpm_return_with_the_guest(uefi: Machines) -> None:
    made = uefi
    take(made)
    before, tpm = variables(made), tpm_blocks(made)
    made.virsh("lab-a", "destroy", GUEST.name)
    inside(made, f"truncate -s 0 {NVRAM}/dom_VARS.fd && rm -r {TPM_STATES}/*")
    made.ok("checkpoint", "restore", "one", "--in-place", "--yes")
    asyncio.run(sound(made, GUEST))
    assert variables(made) == before
    assert len(tpm_blocks(made) & tpm) > 0.9 * len(tpm)
    assert states(made) == {"lab-a": "running"}


def test_a_copy_has_its_own(uefi: Machines) -> None:
    made = uefi
    take(made)
    original, tpm = variables(made), tpm_blocks(made)
    made.ok("checkpoint", "restore", "one", "--as", COPY)
    assert made.virsh("lab-a", "domstate", COPY).strip() == "running"
    assert variables(made, COPY) == original
    assert len(tpm_blocks(made, COPY) & tpm) > 0.9 * len(tpm)
    made.virsh("lab-a", "destroy", COPY)
    made.virsh("lab-a", "start", COPY)  # by its definition
    assert f"{NVRAM}/{COPY}_VARS.fd" in made.virsh("lab-a", "dumpxml", COPY)
    asyncio.run(sound(made, GUEST))


@pytest.mark.long
def test_virsh_restores_an_export(uefi: Machines) -> None:
    made = uefi
    take(made)
    before = variables(made)
    directory = made.shared / "exported"
    made.ok("checkpoint", "export", "one", str(directory))
    made.virsh("lab-a", "destroy", GUEST.name)
    made.virsh("lab-a", "undefine", GUEST.name, "--nvram", "--tpm")
    made.virsh("lab-a", "restore", str(directory / "memory.save"))
    asyncio.run(sound(made, GUEST))
    assert inside(made, f"sha256sum <{directory}/nvram.raw") == before
