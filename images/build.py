#!/usr/bin/env python3
"""Builds the test guest from Debian packages and guest/; stdout's last line is its directory.

The directory, `${XDG_CACHE_HOME:-~/.cache}/vmckpt/images/HASH`, holds `vmlinuz`, `initrd` and
`manifest.json`. HASH is taken over everything that goes in, so an image once built is found again
without a build. Nothing is installed on the machine; root is not needed. The standard library
alone: this runs before any virtual environment exists.

Without a network or a compiler the newest image made of the same sources is used, and stderr says
so.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GUEST = Path(__file__).resolve().parent / "guest"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmckpt"

# In the order in which they must be loaded; one that the kernel has built in is passed over.
MODULES = (
    *("virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci"),
    *("virtio_blk", "failover", "net_failover", "virtio_net", "virtio_console", "virtio-rng"),
    *("evdev", "button", "vmxnet3"),
)
COMPILE = (
    "gcc",
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-static",
    "-pthread",
    "-s",
)
DIRECTORIES = (
    "bin",
    "data",
    "dev",
    "lib",
    "lib64",
    "modules",
    "proc",
    "run",
    "sbin",
    "sys",
    "tmp",
    "var",
    "var/run",
)


class BuildError(Exception):
    """Says what failed, why, and what to do next."""

    def __init__(self, what: str, *, why: str, remedy: str) -> None:
        super().__init__(f"{what}: {why} ({remedy})")


@dataclass(frozen=True, slots=True)
class Package:
    """A Debian package as apt would download it now."""

    file: str
    sha256: str


@dataclass(slots=True)
class Archive:
    """An initramfs in the making: a newc cpio whose bytes follow from its content alone."""

    entries: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def add(self, name: str, content: bytes, mode: int = stat.S_IFREG | 0o755) -> None:
        """Puts one file, directory or symbolic link (its content is the target) under `name`."""
        self.entries[name] = (mode, content)

    def packed(self) -> bytes:
        """All entries in order of name, with no owner and no time, compressed without a time."""
        parts = []
        entries = [*sorted(self.entries.items()), ("TRAILER!!!", (0, b""))]
        for inode, (name, (mode, content)) in enumerate(entries, start=1):
            encoded = name.encode() + b"\0"
            numbers = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
            head = b"070701" + b"".join(b"%08X" % number for number in numbers) + encoded
            parts += [head, b"\0" * (-len(head) % 4), content, b"\0" * (-len(content) % 4)]
        return gzip.compress(b"".join(parts), compresslevel=9, mtime=0)


def main(argv: Sequence[str]) -> int:
    """Builds or finds the image; 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(
        description="Build the vmckpt test guest; prints its directory."
    )
    parser.add_argument(
        "--check-reproducible", action="store_true", help="build twice and compare every byte"
    )
    options = parser.parse_args(argv)
    try:
        if options.check_reproducible:
            check_reproducible()
        print(image())
    except BuildError as error:
        print(f"images/build.py: {error}", file=sys.stderr)
        return 1
    return 0


def image() -> Path:
    """The image of today's inputs, built unless it is there; else the newest of its sources."""
    try:
        inputs = current_inputs()
        target = CACHE / "images" / digest_of(inputs)
        if not target.is_dir():
            build_into(target, inputs)
        return target
    except BuildError as error:
        fallback = newest_of_same_sources()
        if fallback is None:
            raise
        print(f"images/build.py: using an image built before: {error}", file=sys.stderr)
        return fallback


def current_inputs() -> dict[str, dict[str, str]]:
    """What the image is a function of: packages, sources, and what the compiler links in."""
    compiler = shutil.which("gcc")
    libc = Path(run("gcc", "-print-file-name=libc.a").strip()) if compiler else Path("libc.a")
    if not libc.is_absolute():
        raise BuildError(
            "cannot compile the guest's program",
            why="gcc is missing" if not compiler else "the static C library is missing",
            remedy="apt-get install gcc libc6-dev",
        )
    return {
        "packages": {package.file: package.sha256 for package in wanted_packages()},
        "sources": source_digests(),
        "compiler": {
            "gcc": run("gcc", "--version").splitlines()[0],
            "libc.a": sha256(libc.read_bytes()),
        },
    }


def source_digests() -> dict[str, str]:
    """SHA-256 of this file and of each file in guest/."""
    sources = [Path(__file__), *GUEST.iterdir()]
    return {source.name: sha256(source.read_bytes()) for source in sorted(sources)}


def wanted_packages() -> list[Package]:
    """The newest cloud kernel, busybox, the guest agent and its libraries, as apt has them."""
    try:
        kernel = re.search(
            r"linux-image-[0-9][^ ,]*", run("apt-cache", "show", "linux-image-cloud-amd64")
        )
        tree = run(
            *(
                "apt-cache",
                "depends",
                "--recurse",
                "--no-recommends",
                "--no-suggests",
                "--no-conflicts",
            ),
            *("--no-breaks", "--no-replaces", "--no-enhances", "qemu-guest-agent"),
        )
        if kernel is None:
            raise BuildError(
                "no cloud kernel", why="apt knows none for amd64", remedy="apt-get update"
            )
        names = [
            kernel[0],
            "busybox-static",
            "qemu-guest-agent",
            *libraries_below("qemu-guest-agent", tree),
        ]
        with (
            tempfile.TemporaryDirectory() as empty
        ):  # apt says nothing of a file that lies there already
            uris = run("apt-get", "download", "--print-uris", *names, cwd=Path(empty))
    except BuildError as error:
        raise BuildError(
            "cannot resolve the guest's packages",
            why=str(error),
            remedy="amd64 Debian: apt-get update",
        ) from error
    found = re.findall(r"^'.*' (\S+) \d+ SHA256:([0-9a-f]{64})$", uris, re.MULTILINE)
    if len(found) != len(names):
        raise BuildError(
            "cannot resolve the guest's packages",
            why=f"apt names {len(found)} files with a SHA-256 for {len(names)} packages",
            remedy="apt-get update",
        )
    return [Package(file, digest) for file, digest in sorted(found)]


def libraries_below(package: str, tree: str) -> list[str]:
    """The library packages that `package` needs, by way of libraries alone.

    `tree` is what `apt-cache depends --recurse` says; followed blindly it leads to perl and dpkg.
    """
    needs: dict[str, list[str]] = {}
    for line in tree.splitlines():
        if not line.startswith((" ", "<")):
            above = needs.setdefault(line.strip(), [])
        elif name := re.search(r"Depends: ((?:lib|zlib)[a-z0-9.+-]+)$", line):
            above.append(name[1])
    wanted, found = [package], set[str]()
    while wanted:
        fresh = set(needs.get(wanted.pop(), ())) - found
        found |= fresh
        wanted += fresh
    return sorted(found)


def build_into(target: Path, inputs: dict[str, dict[str, str]]) -> None:
    """Builds the image beside `target`, then renames it: one cut short never looks whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
        tree, made = Path(scratch, "tree"), Path(scratch, "image")
        made.mkdir()
        for package in fetched([Package(*item) for item in inputs["packages"].items()]):
            run("dpkg", "-x", str(package), str(tree))
        archive = initramfs(tree, compiled(Path(scratch)))
        kernel = next((tree / "boot").glob("vmlinuz-*"))
        shutil.copyfile(kernel, made / "vmlinuz")
        (made / "initrd").write_bytes(archive.packed())
        (made / "manifest.json").write_text(json.dumps(inputs, indent=1, sort_keys=True) + "\n")
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another build came first; its bytes are the same
                raise


def fetched(packages: Sequence[Package]) -> Iterator[Path]:
    """Each package's file, from the cache or by apt, checked against apt's checksum."""
    store = CACHE / "packages"
    store.mkdir(parents=True, exist_ok=True)
    missing = [package for package in packages if not (store / package.file).is_file()]
    with tempfile.TemporaryDirectory(prefix=".download-", dir=store) as scratch:
        if missing:
            names = [package.file.split("_")[0] for package in missing]
            run(
                "apt-get",
                "-qq",
                "-o",
                "APT::Sandbox::User=root",
                "download",
                *names,
                cwd=Path(scratch),
            )
        for package in missing:
            file = Path(scratch, package.file)
            if not file.is_file() or sha256(file.read_bytes()) != package.sha256:
                raise BuildError(
                    f"cannot fetch {package.file}",
                    why="apt brought something else",
                    remedy="apt-get update, again",
                )
            file.rename(store / package.file)
    for package in packages:
        yield store / package.file


def compiled(scratch: Path) -> bytes:
    """The guest's program, linked statically, with nothing of this build's paths or time in it."""
    sources = sorted(source.name for source in GUEST.glob("*.c"))
    program = scratch / "guestload"
    run(*COMPILE, "-Wl,--build-id=none", "-o", str(program), *sources, cwd=GUEST)
    return program.read_bytes()


def initramfs(tree: Path, program: bytes) -> Archive:
    """The guest's root: busybox, drivers, the agent and its libraries, init, and the program."""
    archive = Archive()
    for name in DIRECTORIES:
        archive.add(name, b"", stat.S_IFDIR | 0o755)
    busybox = tree / "bin/busybox"
    for applet in run(str(busybox), "--list").split():
        archive.add(f"bin/{applet}", b"/bin/busybox", stat.S_IFLNK | 0o777)
    archive.add("bin/busybox", busybox.read_bytes())  # last: it lists itself
    # The agent sets the clock only where it finds this very path.
    archive.add("sbin/hwclock", b"/bin/busybox", stat.S_IFLNK | 0o777)
    for number, module in enumerate(modules(tree / "lib/modules", MODULES)):
        archive.add(
            f"modules/{number:02d}-{module.name}", module.read_bytes(), stat.S_IFREG | 0o644
        )
    agent = tree / "usr/sbin/qemu-ga"
    archive.add("bin/qemu-ga", agent.read_bytes())
    for library in libraries_of(agent, tree):
        archive.add(f"lib/{library.name}", library.read_bytes())
    loader = "ld-linux-x86-64.so.2"
    archive.add(f"lib64/{loader}", f"/lib/{loader}".encode(), stat.S_IFLNK | 0o777)
    archive.add("init", (GUEST / "init").read_bytes())
    archive.add("sbin/shutdown", (GUEST / "shutdown").read_bytes())
    archive.add("bin/guestload", program)
    archive.add("bin/device-hook", (GUEST / "device-hook").read_bytes())
    return archive


def modules(root: Path, names: Sequence[str]) -> Iterator[Path]:
    """Drivers as files, in the order of their names."""
    built_in = next(root.glob("*/modules.builtin")).read_text()
    for name in names:
        file = next(root.rglob(f"{name}.ko"), None)
        if file is not None:
            yield file
        elif f"/{name}.ko\n" not in built_in:
            raise BuildError(
                f"no driver {name}",
                why="this kernel package has it neither as module nor built in",
                remedy="correct MODULES where it was named",
            )


def libraries_of(program: Path, tree: Path) -> list[Path]:
    """Every shared library that `program` needs, directly or not, from the unpacked packages."""
    wanted, found = [program], dict[str, Path]()
    while wanted:
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", str(wanted.pop()))):
            if name in found:
                continue
            library = next((path for path in sorted(tree.rglob(name)) if path.is_file()), None)
            if library is None:
                raise BuildError(
                    f"no {name} for {program.name}",
                    why="no package that it depends on holds it",
                    remedy="correct wanted_packages in images/build.py",
                )
            found[name] = library
            wanted.append(library)
    return [found[name] for name in sorted(found)]


def check_reproducible() -> None:
    """Builds the image twice and compares every byte; raises BuildError on the first difference."""
    inputs = current_inputs()
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".check-", dir=CACHE) as scratch:
        first, second = Path(scratch, "once/image"), Path(scratch, "and/once/more/image")
        build_into(first, inputs)
        build_into(second, inputs)
        for file in sorted(first.iterdir()):
            if file.read_bytes() != (second / file.name).read_bytes():
                raise BuildError(
                    "the build is not reproducible",
                    why=f"{file.name} differs between two builds",
                    remedy="find what in it depends on time, order or place",
                )
    print("reproducible: two builds are the same, byte for byte", file=sys.stderr)


def newest_of_same_sources() -> Path | None:
    """The image built last from the sources that are here, whatever its packages were."""
    manifests = sorted(CACHE.glob("images/*/manifest.json"), key=lambda path: path.stat().st_mtime)
    for manifest in reversed(manifests):
        if json.loads(manifest.read_text())["sources"] == source_digests():
            return manifest.parent
    return None


def run(*command: str, cwd: Path | None = None) -> str:
    """The command's output; raises BuildError with its own words when it fails or is missing."""
    environment = {**os.environ, "LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=True
        )
    except FileNotFoundError as error:
        raise BuildError(
            f"cannot run {command[0]}", why="it is missing", remedy="install it"
        ) from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip() or f"status {error.returncode}"
        why = "\n".join(said.splitlines()[: 2 if command[0] == "apt-get" else 20])
        remedy = "correct it and run again; downloads need the network"
        raise BuildError(f"{command[0]} failed", why=why, remedy=remedy) from error
    return done.stdout


def digest_of(inputs: dict[str, dict[str, str]]) -> str:
    """The image's name: 64 bits over its inputs."""
    return sha256(json.dumps(inputs, sort_keys=True).encode())[:16]


def sha256(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
