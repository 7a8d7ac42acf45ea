"""QEMU's command-line options: which exist, which take a value, and how each is treated."""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from vmckpt.errors import RefusedError


class Option(NamedTuple):
    """One option, without its dash; `value` is None if it takes none."""

    name: str
    value: str | None = None

    @property
    def text(self) -> str:
        """The option as you would type it, for messages."""
        return f"-{self.name}" if self.value is None else f"-{self.name} {self.value}"


class OptionFate(Enum):
    """How the destination treats an option."""

    KEEP = "the guest sees it"
    FILE = "the guest sees what is in the file that it names"
    DROP = "it concerns only the process"
    SCREEN = "it shows the guest's screen"
    REFUSE = "it cannot be carried over"
    REWRITE = "part of it concerns only the process"


def _named(fate: OptionFate, *words: str) -> dict[str, OptionFate]:
    return {name: fate for line in words for name in line.split()}


# From the manual of QEMU 10.0 (qemu-options.hx), with options removed since 7.2.
WITH_VALUE = (
    _named(
        OptionFate.KEEP,
        "m smp cpu global uuid rtc numa vga watchdog watchdog-action action icount",
        "overcommit sandbox g prom-env usbdevice semihosting-config iscsi",
    )
    | _named(OptionFate.FILE, "kernel initrd dtb bios shim")
    | {"append": OptionFate.KEEP, "mem-path": OptionFate.REWRITE}
    | _named(
        OptionFate.DROP,
        "pidfile D d trace dfilter monitor qmp qmp-pretty mon gdb incoming name runas run-with",
        "chroot L add-fd echr msg k accel tb-size compat loadvm",
        "seed",
    )
    | _named(OptionFate.SCREEN, "vnc spice display rotate")
    | _named(
        OptionFate.REWRITE,
        "machine M drive hda hdb hdc hdd cdrom fda fdb sd mtdblock pflash blockdev device netdev",
        "nic net object chardev serial parallel debugcon audiodev audio fw_cfg smbios acpitable",
        "option-rom boot set",
    )
    | _named(
        OptionFate.REFUSE,
        "readconfig writeconfig virtfs fsdev tpmdev plugin dump-vmstate qtest",
        "qtest-log xen-domid xen-attach",
    )
)
FLAGS = (
    _named(
        OptionFate.KEEP,
        "usb nodefaults no-user-config nouserconfig no-acpi no-hpet no-fd-bootchk no-reboot",
        "no-shutdown win2k-hack mem-prealloc semihosting only-migratable",
    )
    | _named(
        OptionFate.DROP, "daemonize S s enable-kvm no-quit async-teardown enable-sync-profile",
        "perfmap jitdump singlestep",
    )
    | _named(
        OptionFate.SCREEN, "nographic curses sdl gtk full-screen alt-grab ctrl-grab no-frame",
        "show-cursor portrait",
    )
    | _named(OptionFate.REFUSE, "snapshot preconfig xen-domid-restrict")
)  # fmt: skip


def split_options(argv: Sequence[str]) -> Iterator[Option]:
    """The options of a command line without its program.

    Raises RefusedError for an unknown option: the guest may depend on it.
    """
    words = iter(argv)
    for word in words:
        if not word.startswith("-") or word == "-":
            # A bare word is the first disk (system/vl.c).
            yield Option("hda", word)
            continue
        name = word.removeprefix("-").removeprefix("-")
        if name in FLAGS:
            yield Option(name)
        elif name in WITH_VALUE:
            yield Option(name, next(words, ""))
        else:
            raise RefusedError(
                f"the command line has -{name}",
                why="vmckpt does not know this option, and so not what the guest sees of it",
                remedy="start the QEMU without it, or move the VM by hand",
            )


def fate(option: Option) -> OptionFate:
    """How the option is treated."""
    return (FLAGS if option.value is None else WITH_VALUE)[option.name]
