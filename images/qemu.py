"""Puts a QEMU of a given version beside whatever is installed, and prints where it is.

    python3 images/qemu.py 10.0      # last line of stdout: .../qemu/10.0/bin/qemu-system-x86_64

Debian's own builds, unpacked and never installed: 7.2 is bookworm's, 10.0 is bookworm-backports'.
Beside the emulator lie `qemu-img` and `qemu-nbd` of the same version. They bring every library
that they need but the C library, so that they run alike on a bare machine and on one whose own
QEMU comes and goes. Needs Debian's python3 and apt, no root, and the network only the first time.
"""

import argparse
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RELEASE = "bookworm"
SUITE_OF = {"7.2": RELEASE, "10.0": f"{RELEASE}-backports"}
COMMANDS = ("qemu-system-x86_64", "qemu-img", "qemu-nbd")
ASKED_FOR = ("qemu-system-x86", "qemu-utils")
DATA_DIRS = ("usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu")
# Kept as whole trees; of all other packages only the libraries that these need are kept.
WHOLE = re.compile(r"qemu-|seabios$|ipxe-")
# The C library stays the machine's own: it and the loader that runs it are one pair.
C_LIBRARY = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|util|mvec|anl))\.so\.\d+$")
RECIPE = 1  # raise it when what lies in the cache changes shape: older entries are made anew
APT_TIMEOUT_S = 600
TOOL_TIMEOUT_S = 60


class CannotProvideError(Exception):
    """Says what failed, why, and what to do next."""

    def __init__(self, what: str, *, why: str, remedy: str) -> None:
        super().__init__(what)
        self.what, self.why, self.remedy = what, why, remedy


def provide(version: str) -> Path:
    """The emulator of `version`, taken from the cache or fetched and put there.

    Two callers at once are safe: the second waits and finds the work done. A caller that is killed
    leaves nothing that a later one would take for a QEMU. Raises CannotProvideError.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmckpt" / "qemu"
    home = cache / version
    emulator = home / "bin" / COMMANDS[0]
    if is_complete(home):
        return emulator
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f".{version}.lock"):
        if is_complete(home):
            return emulator
        for leftover in cache.glob(f".{version}-*"):
            # A killed caller's apt may still be writing there: then the next one removes the rest.
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=cache) as scratch:
            made = make(version, Path(scratch), home)
            if home.exists():
                home.rename(Path(scratch) / "outdated")
            made.rename(home)
    return emulator


def is_complete(home: Path) -> bool:
    """Whether `home` holds a QEMU that this version of the script made, at that place."""
    try:
        manifest = json.loads((home / "manifest.json").read_text())
        return bool(manifest["recipe"] == RECIPE and manifest["home"] == str(home))
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path` for the block; waits for whoever has it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- making one ----------------------------------------------------------------------------------


def make(version: str, scratch: Path, home: Path) -> Path:
    """Builds in `scratch` what is to be renamed to `home`, tries it, and returns its place."""
    packages = fetch(SUITE_OF[version], scratch)
    made, libraries = scratch / "made", scratch / "libraries"
    root = made / "root"
    root.mkdir(parents=True)
    libraries.mkdir()
    for deb in sorted((scratch / "debs").glob("*.deb")):
        package = deb.name.partition("_")[0]
        run(["dpkg", "-x", str(deb), str(root if WHOLE.match(package) else libraries)])
    # Without this a missing one would go unseen wherever the machine has firmware of its own.
    absent = [name for name in DATA_DIRS if not (root / name).is_dir()]
    if absent:
        raise CannotProvideError(
            f"QEMU of {SUITE_OF[version]} comes without {', '.join(absent)}",
            why=f"none of the packages {', '.join(packages)} has it",
            remedy="name the package that holds it in ASKED_FOR in images/qemu.py",
        )
    gather_libraries(root, libraries, made / "lib")
    write_wrappers(made / "bin", made)
    said = run([str(made / "bin" / COMMANDS[0]), "-version"])
    if f"version {version}." not in said:
        raise CannotProvideError(
            f"{SUITE_OF[version]} has no QEMU {version}",
            why=f"what it has says {said.splitlines()[0]!r}",
            remedy="check that the package sources of this machine are Debian's own",
        )
    write_wrappers(made / "bin", home)
    manifest = {"recipe": RECIPE, "home": str(home), "packages": dict(sorted(packages.items()))}
    (made / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return made


def gather_libraries(root: Path, libraries: Path, into: Path) -> None:
    """Copies every library that a QEMU program or module under `root` needs to the folder `into`.

    Raises CannotProvideError when one is in no package: taking the machine's own instead would
    make a cache entry that breaks as soon as that one is removed or upgraded.
    """
    into.mkdir()
    folders = sorted({lib.parent for lib in libraries.rglob("*.so*")})
    programs = [root / "usr/bin" / name for name in COMMANDS]
    listing = run(
        ["ldd", *map(str, [*programs, *root.glob("usr/lib/*-linux-*/qemu/*.so")])],
        {"LD_LIBRARY_PATH": ":".join(map(str, folders))},
    )
    # A line is `libfoo.so.1 => /where/libfoo.so.1 (0x..)`, or `libfoo.so.1 => not found`.
    needed = dict(re.findall(r"^\t(\S+) => (not found|\S+)", listing, re.MULTILINE))
    for name, found in sorted(needed.items()):
        if Path(found).is_relative_to(libraries):
            shutil.copy2(Path(found).resolve(), into / name)
        elif not C_LIBRARY.match(name):
            raise CannotProvideError(
                f"the library {name} is in none of the packages",
                why=f"the loader answers {found!r}; a module may need more than its package says",
                remedy="name the package that holds it in ASKED_FOR in images/qemu.py",
            )


def write_wrappers(folder: Path, home: Path) -> None:
    """Writes to `folder` one small script per command, which runs the program under `home`."""
    root = home / "root"
    modules = next(iter(sorted((folder.parent / "root").glob("usr/lib/*-linux-*/qemu"))), None)
    settings = [f"LD_LIBRARY_PATH={shlex.quote(str(home / 'lib'))}"]
    if modules is not None:
        where = root / modules.relative_to(folder.parent / "root")
        settings.append(f"QEMU_MODULE_DIR={shlex.quote(str(where))}")
    folder.mkdir(exist_ok=True)
    for name in COMMANDS:
        data = DATA_DIRS if name.startswith("qemu-system-") else ()
        words = [str(root / "usr/bin" / name), *(w for d in data for w in ("-L", str(root / d)))]
        script = folder / name
        script.write_text(f'#!/bin/sh\n{" ".join(settings)} exec {shlex.join(words)} "$@"\n')
        script.chmod(0o755)


# -- Debian's packages ---------------------------------------------------------------------------


def fetch(suite: str, scratch: Path) -> dict[str, str]:
    """Downloads QEMU of `suite` and all that it depends on to `scratch`/debs: {name: version}.

    apt gets folders of its own, so that neither the machine's package lists nor its lock are
    touched, and an empty list of installed packages, so that the answer is the same everywhere.
    """
    debs = scratch / "debs"
    for folder in (debs, scratch / "state/lists/partial", scratch / "cache/archives/partial"):
        folder.mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "debian.sources").write_text(private_sources(suite))
    config = scratch / "apt.conf"
    config.write_text(
        # A machine's own hooks belong to its own updates.
        "#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
        f'Dir::State "{scratch}/state";\nDir::State::status "{scratch}/status";\n'
        f'Dir::Cache "{scratch}/cache";\nDir::Etc::sourcelist "{scratch}/debian.sources";\n'
        'Dir::Etc::sourceparts "/dev/null";\nDir::Etc::preferences "/dev/null";\n'
        'Dir::Etc::preferencesparts "/dev/null";\nAcquire::Languages "none";\n'
        'Acquire::Retries "3";\nAPT::Install-Recommends "false";\nAPT::Sandbox::User "";\n'
        'APT::Update::Error-Mode "any";\n'
    )
    apt = ["apt-get", "-q", "-c", str(config), "-t", suite]
    say(f"fetching QEMU from {suite}")
    run([*apt, "update"], timeout_s=APT_TIMEOUT_S)
    plan = run([*apt, "--simulate", "install", *ASKED_FOR])
    packages = dict(re.findall(r"^Inst (\S+) \((\S+)", plan, re.MULTILINE))
    packages.pop("libc6", None)
    wanted = [
        f"{name}={version}"
        for name, version in packages.items()
        if WHOLE.match(name) or re.match(r"lib|zlib", name)
    ]
    run([*apt, "download", *wanted], cwd=debs, timeout_s=APT_TIMEOUT_S)
    return dict(entry.split("=", 1) for entry in wanted)


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of the machine's package sources, in the fields of sources.list(5)."""

    fields: Mapping[str, str]

    def has(self, suite: str) -> bool:
        """Whether the entry is switched on and holds main's binaries of `suite`."""
        get = self.fields.get
        return (
            "deb" in get("types", "").split()
            and suite in (word.rstrip("/") for word in get("suites", "").split())
            and "main" in get("components", "").split()
            and get("enabled", "yes").lower() != "no"
        )

    def stanza(self, suites: Iterable[str]) -> str:
        """The same archive and keys, for `suites`; everything but package lists left out."""
        kept = {k: v for k, v in self.fields.items() if k not in {"types", "suites", "components"}}
        asked = {
            "types": "deb",
            "suites": " ".join(suites),
            "components": "main",
            "targets": "Packages",
        }
        return "".join(f"{key}: {value}\n" for key, value in (asked | kept).items())


def private_sources(suite: str, etc_apt: Path = Path("/etc/apt")) -> str:
    """A sources file that reaches `suite` by the archive that this machine already uses."""
    release = re.search(r"^VERSION_CODENAME=(\w+)", read("/etc/os-release"), re.MULTILINE)
    codename = release[1] if release else RELEASE
    files = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]
    sources = [source for file in files if file.is_file() for source in parse_sources(file)]
    archives = [source for source in sources if source.has(codename)]
    if not archives:
        raise CannotProvideError(
            "no Debian archive is known to this machine",
            why=f"nothing under {etc_apt} names the suite {codename!r} with the component 'main'",
            remedy="run this on Debian, with its package sources set up for apt",
        )
    # Vendors use Debian's code names too: Debian's own entry is the one with Debian's own key.
    own = "debian-archive"
    archive = max(archives, key=lambda source: own in source.fields.get("signed-by", ""))
    stanzas = [archive.stanza(dict.fromkeys((RELEASE, suite)))]
    security = next((source for source in sources if source.has(f"{codename}-security")), None)
    if security is not None:
        stanzas.append(security.stanza([f"{RELEASE}-security"]))
    return "\n".join(stanzas)


def parse_sources(file: Path) -> Iterator[Source]:
    """Reads a sources file of either style; see sources.list(5)."""
    text = "\n".join(line for line in read(file).splitlines() if not line.lstrip().startswith("#"))
    if file.suffix == ".sources":
        for stanza in re.split(r"\n\s*\n", text):
            # A field goes on in the lines after it that begin with a space (a key in full does).
            pairs = re.findall(r"^([\w-]+):[ \t]*(.*(?:\n[ \t].*)*)", stanza, re.MULTILINE)
            yield Source({name.lower(): value.strip() for name, value in pairs})
    elif file.suffix == ".list":
        line = r"^(deb)\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s+(.*)$"
        for kind, options, uri, suite, components in re.findall(line, text, re.MULTILINE):
            given = dict(word.split("=", 1) for word in options.split() if "=" in word)
            fields = {"types": kind, "uris": uri, "suites": suite, "components": components}
            signed = {"signed-by": given["signed-by"]} if "signed-by" in given else {}
            yield Source(fields | signed)


# -- the machine ---------------------------------------------------------------------------------


def read(path: str | Path) -> str:
    """The text of `path`, or nothing when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def run(
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    timeout_s: float = TOOL_TIMEOUT_S,
) -> str:
    """What `argv` prints; raises CannotProvideError when it is missing, fails or takes too long."""
    name = Path(argv[0]).name
    try:
        done = subprocess.run(
            argv,
            check=True,
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C", **(env or {})},
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
        )
    except FileNotFoundError as exc:
        raise CannotProvideError(
            f"there is no {name}",
            why="QEMU is unpacked from Debian's packages with apt and dpkg",
            remedy="run this on Debian 12 or newer",
        ) from exc
    except subprocess.CalledProcessError as exc:
        raise CannotProvideError(
            f"{name} failed with status {exc.returncode}",
            why=" / ".join(exc.stderr.strip().splitlines()[-3:]) or "it said nothing",
            remedy="check the network and the package sources of this machine, then try again",
        ) from exc
    except subprocess.TimeoutExpired as exc:
        raise CannotProvideError(
            f"{name} did not end within {timeout_s:.0f} s",
            why="the archive may be out of reach or slow",
            remedy="check the network, then try again",
        ) from exc
    return done.stdout


def say(words: str) -> None:
    """Tells a person what goes on; stdout belongs to the answer."""
    print(f"images/qemu.py: {words}", file=sys.stderr, flush=True)


def main() -> int:
    """Prints the emulator's path; 1 and a reason on stderr when there is none to be had."""
    parser = argparse.ArgumentParser(description="Provide a QEMU beside the installed one.")
    parser.add_argument("version", choices=sorted(SUITE_OF))
    try:
        print(provide(parser.parse_args().version))
    except CannotProvideError as error:
        say(f"error: {error.what}: {error.why}")
        say(f"to do: {error.remedy}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
