"""Builds a machine, for a QEMU to run, in which vmckpt runs VMs of its own: kernel, initrd, disk.

The disk holds what it takes of this machine, at the same paths: Python with the virtual
environment, vmckpt, its tests, a QEMU and a test guest of the cache. Nothing is downloaded. The
kernel and its modules come from the package that the test guest was made of.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from images import build
from images.build import Archive, BuildError, Package

# In the order in which they must be loaded.
MODULES = (
    *("virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci"),
    *("virtio_blk", "virtio-rng"),
    *("irqbypass", "vfio_virqfd", "vfio", "vfio_iommu_type1", "vfio-pci-core", "vfio-pci"),
)
# Debian packages that this machine has, whose programs go along.
PACKAGES = ("coreutils", "dash", "findutils", "grep", "iproute2", "mount", "procps", "sed",
            "util-linux")  # fmt: skip
PROGRAMS = re.compile(r"(/usr)?/(bin|sbin)/[^/]+")
MERGED = ("bin", "sbin", "lib", "lib64")
EMPTY = ("dev", "proc", "sys", "run", "root", "var", "tmp", "etc")
DISK_BYTES = 3 << 30
MKE2FS = ("/sbin/mke2fs", "-q", "-t", "ext4", "-O", "^has_journal")
INIT = """\
#!/bin/sh
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in /modules/*.ko; do
    insmod "$module"
done
mount -t ext4 /dev/vda /root
for name in proc sys dev; do
    mount --move /$name /root/$name
done
exec switch_root /root /init
"""


def make(
    into: Path, image: Path, trees: Iterable[Path], init: str, kernel: Path | None = None
) -> None:
    """Write `vmlinuz`, `initrd` and `disk` to a directory; `init` is the first program's script.

    `image` is the test guest; it and `trees`, files or directories, come along. `kernel`: one of
    images/kernel.py instead of the test guest's. Raises BuildError.
    """
    make_kernel(into, image, kernel or MODULES)
    root = into / "root"
    fill(root, [image, *trees])
    first = root / "init"
    first.write_text(init)
    first.chmod(0o755)
    make_disk(into / "disk", root)


def make_kernel(into: Path, image: Path, kernel: Path | Sequence[str]) -> None:
    """Write `vmlinuz` and `initrd`, which loads drivers and then the disk's /init.

    `kernel`: one of images/kernel.py, or the drivers of the test guest's. Raises BuildError.
    """
    inputs = json.loads((image / "manifest.json").read_text())["packages"]
    wanted = [
        Package(*one)
        for one in inputs.items()
        if one[0].startswith(("linux-image-", "busybox-static_"))
    ]
    unpacked = into / "packages"
    for package in build.fetched(wanted):
        build.run("dpkg", "-x", str(package), str(unpacked))
    if isinstance(kernel, Path):
        drivers = sorted((kernel / "modules").iterdir())
    else:
        drivers = list(build.modules(unpacked / "lib/modules", kernel))
    source = kernel if isinstance(kernel, Path) else image
    shutil.copyfile(source / "vmlinuz", into / "vmlinuz")
    (into / "initrd").write_bytes(initramfs(unpacked / "bin/busybox", drivers).packed())
    shutil.rmtree(unpacked)


def make_disk(disk: Path, root: Path) -> None:
    """Write the directory `root` to a disk, and remove it."""
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    build.run(*MKE2FS, "-d", str(root), str(disk))
    shutil.rmtree(root)


def initramfs(busybox: Path, drivers: Sequence[Path]) -> Archive:
    """Loads the drivers and goes over to the disk, whose first program is /init."""
    archive = Archive()
    for name in ("bin", "dev", "modules", "proc", "root", "sys"):
        archive.add(name, b"", stat.S_IFDIR | 0o755)
    for applet in ("insmod", "mount", "sh", "switch_root"):
        archive.add(f"bin/{applet}", b"/bin/busybox", stat.S_IFLNK | 0o777)
    archive.add("bin/busybox", busybox.read_bytes())
    for number, driver in enumerate(drivers):
        name = f"modules/{number:02d}-{driver.name}"
        archive.add(name, driver.read_bytes(), stat.S_IFREG | 0o644)
    archive.add("init", INIT.encode())
    return archive


def fill(root: Path, trees: Iterable[Path]) -> None:
    """This machine's Python and programs and the trees, with all libraries that they need."""
    for name in (*EMPTY, *(f"usr/{name}" for name in MERGED)):
        (root / name).mkdir(parents=True)
    for name in MERGED:
        (root / name).symlink_to(f"usr/{name}")
    for tree in (Path(sysconfig.get_paths()["stdlib"]), Path(sys.prefix), *trees):
        target = root / tree.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        build.run("cp", "-a", str(tree), str(target))
    python = Path(sys.prefix, "bin/python").resolve()
    called = (path.readlink() for path in Path(sys.prefix, "bin").iterdir() if path.is_symlink())
    links = (path for path in called if path.is_absolute())
    for file in (python, *links, Path("/etc/passwd"), Path("/etc/group"), *programs()):
        put(root, file)
    for library in libraries(root):
        put(root, library)


def programs() -> Iterator[Path]:
    """The programs of PACKAGES."""
    for line in build.run("dpkg", "-L", *PACKAGES).splitlines():
        if PROGRAMS.fullmatch(line) and os.path.lexists(line):
            yield Path(line)


def put(root: Path, file: Path) -> None:
    """Copy a file to the same place below `root`, and what it leads to if it is a link."""
    place = Path(os.path.realpath(file.parent)) / file.name
    target = root / place.relative_to("/")
    if place.is_dir() or os.path.lexists(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(place, target, follow_symlinks=False)
    if place.is_symlink():
        put(root, place.parent / place.readlink())


def libraries(root: Path) -> set[Path]:
    """What the programs and libraries below `root` need of this machine's, and their loader."""
    found = [str(path) for path in root.rglob("*") if is_elf(path)]
    # Some are not for the machine's own loader: their own directories have what they need.
    said = subprocess.run(["ldd", *found], capture_output=True, text=True, check=False).stdout
    names = re.findall(r"(?:=> |^\t)((?:/usr)?/lib\S+) \(", said, re.MULTILINE)
    if not names:
        raise BuildError("no libraries", why="ldd names none", remedy="apt-get install libc-bin")
    return {Path(name) for name in names}


def is_elf(path: Path) -> bool:
    """Whether it is a program or library."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
