"""Puts sshd and a libvirt of a given version beside whatever is installed, and prints where.

    python3 images/hosts.py 11.3      # last line of stdout: .../hosts/11.3

What test hosts need that look like machines (`vmckpt lab up --real`): Debian's openssh-server and
client, libvirtd with its QEMU and storage drivers, and virsh; libvirt is bookworm-backports'. For
its domains UEFI firmware (OVMF) and an emulated TPM (swtpm). Unpacked and never installed; no
service starts. The folder's `usr`, laid over /usr in a mount namespace of its own (`mount -t
overlay hosts -o lowerdir=FOLDER/usr:/usr /usr`), is what their installation would have put there.
Settings in /etc are the user's to write.
"""

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the package `images`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from images import debian
from images.debian import CannotProvideError

SUITE_OF = {"11.3": debian.BACKPORTS}
SSH = ("openssh-server", "openssh-client", "openssh-sftp-server")
LIBVIRT = (
    "libvirt-daemon",
    "libvirt-daemon-driver-qemu",
    "libvirt-daemon-driver-storage",
    "libvirt-clients",
)
FIRMWARE = ("ovmf", "swtpm", "swtpm-tools", "gnutls-bin")
# Kept as whole trees; of all other packages only the libraries that these need are kept.
WHOLE = re.compile(r"openssh-|libvirt-|libvirt0$|ovmf$|swtpm|gnutls-bin$")
KEPT = re.compile(rf"{WHOLE.pattern}|lib|zlib")
PROGRAMS = ("usr/sbin/sshd", "usr/sbin/libvirtd", "usr/bin/virsh", "usr/bin/swtpm",
            "usr/share/OVMF/OVMF_CODE_4M.fd")  # fmt: skip
DRIVERS = ("qemu", "storage")
RECIPE = 3  # raise it when what lies in the cache changes shape: older entries are made anew


def provide(version: str) -> Path:
    """The folder for libvirt `version`, taken from the cache or fetched and put there.

    Raises CannotProvideError.
    """

    def make(scratch: Path, _: Path) -> tuple[Path, Mapping[str, str]]:
        return make_hosts(version, scratch)

    return debian.provide("hosts", version, recipe=RECIPE, make=make)


def make_hosts(version: str, scratch: Path) -> tuple[Path, Mapping[str, str]]:
    """Builds the folder in `scratch`; its place and packages."""
    suite = SUITE_OF[version]
    debian.say(f"fetching sshd and libvirt from {suite}")
    # Only libvirt: other libraries of that suite would hide the machine's from its own programs.
    words = [*SSH, *FIRMWARE, *(f"{name}/{suite}" for name in LIBVIRT)]
    packages = debian.fetch(scratch, suite, words, kept=KEPT)
    made, libraries = scratch / "made", scratch / "libraries"
    debian.unpack(scratch, made, libraries, whole=WHOLE)
    if not packages["libvirt0"].startswith(f"{version}."):
        raise CannotProvideError(
            f"{suite} has no libvirt {version}",
            why=f"it has {packages['libvirt0']}",
            remedy="check that the package sources of this machine are Debian's own",
        )
    folder = made / "usr/lib/x86_64-linux-gnu"
    drivers = [folder / f"libvirt/connection-driver/libvirt_driver_{name}.so" for name in DRIVERS]
    for settings in ("etc", "lib", "var"):
        shutil.rmtree(made / settings)
    absent = [str(path) for path in (*(made / p for p in PROGRAMS), *drivers) if not path.is_file()]
    if absent:
        raise CannotProvideError(
            f"the packages come without {', '.join(absent)}",
            why=f"none of {', '.join(packages)} has it",
            remedy="name the package that holds it in images/hosts.py",
        )
    for library in (folder / "swtpm").iterdir():  # where only its programs would look for them
        library.rename(folder / library.name)
    debian.gather_libraries(elf_files(made / "usr"), libraries, folder)
    return made, packages


def elf_files(folder: Path) -> Iterator[Path]:
    """The programs and libraries below `folder`."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


if __name__ == "__main__":
    sys.exit(debian.answer("Provide what test hosts need.", SUITE_OF, provide))
