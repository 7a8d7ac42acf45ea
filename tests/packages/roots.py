"""A bare Debian of a release, from the archive that this machine uses."""

from pathlib import Path

from images.debian import private_sources
from tests.role.commands import output

REPOSITORY = Path(__file__).parents[2]
# A minute on a quiet machine.
TIMEOUT_S = 600


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
