"""A bare Debian of a release, from the archive that this machine uses."""

from dataclasses import dataclass
from pathlib import Path

from images.debian import private_sources
from tests.role.commands import output

REPOSITORY = Path(__file__).parents[2]
# A minute on a quiet machine.
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Root:
    """A directory with a Debian in it, and nothing that its own packages did not bring."""

    path: Path
    release: str

    def run(self, *argv: str) -> str:
        """What a command in the root prints. Its processes and mounts end with it."""
        proc = f"--mount-proc={self.path / 'proc'}"
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", proc]
        clean = ["env", "--ignore-environment", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"]
        settings = ["HOME=/root", "DEBIAN_FRONTEND=noninteractive", "VMCKPT_STATE_DIR=/tmp/state"]
        command = [*apart, "chroot", str(self.path), *clean, *settings, *argv]
        return output(command, timeout_s=TIMEOUT_S)

    def install(self, *packages: str) -> None:
        """Packages, by name or file, with what they depend on."""
        self.run("apt-get", "update")
        self.run("apt-get", "install", "--yes", "--no-install-recommends", *packages)


def bootstrap(release: str, path: Path, *options: str) -> None:
    """Make `path`, a directory or a .tar, a Debian with apt, by mmdebstrap. Needs root."""
    sources = path.parent / f"{release}.sources"
    sources.write_text(private_sources(release, release=release))
    wanted = ["--variant=apt", *options, release, str(path), str(sources)]
    # Mounts that a killed run leaves are gone with its namespace.
    output(["unshare", "--mount", "mmdebstrap", "--mode=root", *wanted], timeout_s=TIMEOUT_S)


def package() -> Path:
    """What `make dist` built."""
    [deb] = (REPOSITORY / "dist").glob("vmckpt_*.deb")
    return deb
