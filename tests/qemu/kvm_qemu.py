"""Stands in for a QEMU binary: the real one, whose VMs run under KVM from a tiny ROM of their own.

The machines at hand have a KVM that emulates what firmware and Linux do, too slowly for either to
come up, and no vmx or svm, without which vmckpt takes no KVM by itself. A few instructions in real
mode do run. `ROM` is 64 KiB that begin at its last 16 bytes:

    again:  count down 20,000; for each of the 128 pages from 64 KiB on: its second word has to be
            the number of this round (else "!" is written to the first serial port), and becomes
            the next one; that number is written there, 8 hex digits and a newline
"""

import os
import sys
from pathlib import Path

_BEGIN = bytes.fromhex("ea000000f0")  # ljmp $0xf000,$0
_CODE = bytes.fromhex(
    "fa31c08ed88ed0bc007c6631ffbafb03b003ee"  # no interrupts, a stack, round 0, 8 bits a byte
    "66b9204e0000664975fc"  # count down
    "bb00108ec32666393e0400740a6609ff7405b121e83d00"  # is the page right?
    "67668d47012666a3040081c3000181fb009072d8"  # its next number; the next page
    "66476689fabe080066c1c20488d180e10f80c13080f939760380c127e80a004e75e6b10ae80200eba2"  # tell it
    "52bafd03eca82074fbbaf80388c8ee5ac3"  # a byte to the serial port, when that is free
)
ROM = _CODE.ljust(0xFFF0, b"\0") + _BEGIN.ljust(16, b"\0")
_REPLACED = {"-accel": "kvm", "-cpu": "max,arch-capabilities=off"}


def become_qemu() -> None:
    """Only of a VM: what vmckpt asks a QEMU without one is as ever."""
    real, argv = os.environ["VK_QEMU"], sys.argv[1:]
    if "-pidfile" in argv:
        rom = Path(os.environ["VK_ROM"])
        for option, value in _REPLACED.items():
            argv[argv.index(option) + 1] = value
        argv += ["-bios", str(rom)]
    os.execv(real, [real, *argv])


if __name__ == "__main__":
    become_qemu()
