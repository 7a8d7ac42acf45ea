"""Debian's packages: fetched by apt, unpacked and never installed, kept in the user's cache.

What images/qemu.py, hosts.py and etcd.py share. apt works with folders of its own: the machine's
package lists, its lock and what is installed play no part, so the answer is the same everywhere.
Needs Debian's python3 and apt, no root, and the network only the first time.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RELEASE = "bookworm"
BACKPORTS = f"{RELEASE}-backports"
# The C library stays the machine's own: it and the loader that runs it are one pair.
C_LIBRARY = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|util|mvec|anl))\.so\.\d+$")
LOADER = "ld-linux-x86-64.so.2"
APT_TIMEOUT_S = 600
TOOL_TIMEOUT_S = 60
# Makes in the first folder what is to be renamed to the second: its place there, its packages.
Maker = Callable[[Path, Path], tuple[Path, Mapping[str, str]]]


class CannotProvideError(Exception):
    """Says what failed, why, and what to do next."""

    def __init__(self, what: str, *, why: str, remedy: str) -> None:
        super().__init__(what)
        self.what, self.why, self.remedy = what, why, remedy


# -- the cache -----------------------------------------------------------------------------------


def provide(kind: str, version: str, *, recipe: int, make: Maker) -> Path:
    """The folder `kind`/`version` of the cache, made unless `recipe` made it before.

    Two callers at once are safe: the second waits and finds the work done. A caller that is killed
    leaves nothing that a later one would take for the folder. Raises CannotProvideError.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmckpt" / kind
    home = cache / version
    if is_complete(home, recipe):
        return home
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f".{version}.lock"):
        if is_complete(home, recipe):
            return home
        for leftover in cache.glob(f".{version}-*"):
            # A killed caller's apt may still be writing there: then the next one removes the rest.
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=cache) as scratch:
            made, packages = make(Path(scratch), home)
            manifest = {
                "recipe": recipe,
                "home": str(home),
                "packages": dict(sorted(packages.items())),
            }
            (made / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
            if home.exists():
                home.rename(Path(scratch) / "outdated")
            made.rename(home)
    return home


def provide_program(
    kind: str, version: str, *, suite: str, package: str, program: str, says: str, recipe: int
) -> Path:
    """One package of `suite`, unpacked; the path of its `program`, which needs the C library alone.

    `says`: what its --version prints for `version`. Raises CannotProvideError.
    """
    whole = re.compile(rf"{package}$")

    def make(scratch: Path, _: Path) -> tuple[Path, Mapping[str, str]]:
        say(f"fetching {kind} from {suite}")
        packages = fetch(scratch, suite, [package], kept=whole)
        made = scratch / "made"
        unpack(scratch, made, scratch / "libraries", whole=whole)
        said = run([str(made / program), "--version"])
        if says not in said:
            raise CannotProvideError(
                f"{suite} has no {kind} {version}",
                why=f"what it has says {said.splitlines()[0]!r}",
                remedy="check that the package sources of this machine are Debian's own",
            )
        return made, packages

    return provide(kind, version, recipe=recipe, make=make) / program


def is_complete(home: Path, recipe: int) -> bool:
    """Whether `home` holds what this recipe made, at that place."""
    try:
        manifest = json.loads((home / "manifest.json").read_text())
        return bool(manifest["recipe"] == recipe and manifest["home"] == str(home))
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path` for the block; waits for whoever has it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- packages ------------------------------------------------------------------------------------


def fetch(
    scratch: Path,
    suite: str,
    words: Sequence[str],
    *,
    kept: re.Pattern[str],
    release: str = RELEASE,
) -> dict[str, str]:
    """Downloads to `scratch`/debs what `apt-get install` `words` would: {name: version}.

    Of all that comes with it only what matches `kept` from its beginning. The C library is among it
    if `release` is not this machine's: programs of another one need theirs.
    """
    debs = scratch / "debs"
    for folder in (debs, scratch / "state/lists/partial", scratch / "cache/archives/partial"):
        folder.mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "debian.sources").write_text(private_sources(suite, release=release))
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
    apt = ["apt-get", "-q", "-c", str(config)]
    run([*apt, "update"], timeout_s=APT_TIMEOUT_S)
    plan = run([*apt, "--simulate", "install", *words])
    packages = dict(re.findall(r"^Inst (\S+) \((\S+)", plan, re.MULTILINE))
    left = {"libc6"} if release == RELEASE else set()
    packages = {k: v for k, v in packages.items() if k not in left and kept.match(k)}
    wanted = [f"{name}={version}" for name, version in packages.items()]
    run([*apt, "download", *wanted], cwd=debs, timeout_s=APT_TIMEOUT_S)
    return packages


def unpack(scratch: Path, root: Path, libraries: Path, *, whole: re.Pattern[str]) -> None:
    """Unpacks what `fetch` brought to `root` if it matches `whole`, else to `libraries`."""
    root.mkdir(parents=True)
    libraries.mkdir()
    for deb in sorted((scratch / "debs").glob("*.deb")):
        package = deb.name.partition("_")[0]
        run(["dpkg", "-x", str(deb), str(root if whole.match(package) else libraries)])


def gather_libraries(programs: Iterable[Path], libraries: Path, into: Path) -> None:
    """Copies every library that `programs` need from below `libraries` to the folder `into`.

    Raises CannotProvideError when one is in no package: taking the machine's own instead would
    make a cache entry that breaks as soon as that one is removed or upgraded.
    """
    into.mkdir(parents=True, exist_ok=True)
    folders = sorted({lib.parent for lib in libraries.rglob("*.so*")} | {into})
    path = ":".join(map(str, folders))
    if loader := next(libraries.rglob(LOADER), None):
        ask = [str(loader), "--library-path", path, "--list"]
        listing = "".join(run([*ask, str(program)]) for program in programs)
    else:
        listing = run(["ldd", *map(str, programs)], {"LD_LIBRARY_PATH": path})
    # A line is `libfoo.so.1 => /where/libfoo.so.1 (0x..)`, or `libfoo.so.1 => not found`.
    needed = dict(re.findall(r"^\t(\S+) => (not found|\S+)", listing, re.MULTILINE))
    for name, found in sorted(needed.items()):
        if Path(found).is_relative_to(libraries):
            # The loader's own name is a path.
            shutil.copy2(Path(found).resolve(), into / Path(name).name)
        elif not C_LIBRARY.match(name) and not Path(found).is_relative_to(into):
            raise CannotProvideError(
                f"the library {name} is in none of the packages",
                why=f"the loader answers {found!r}; a module may need more than its package says",
                remedy="name the package that holds it in the script's ASKED_FOR",
            )


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


def private_sources(suite: str, etc_apt: Path = Path("/etc/apt"), *, release: str = RELEASE) -> str:
    """A sources file for `release` and `suite`, from the archive that this machine already uses."""
    own_release = re.search(r"^VERSION_CODENAME=(\w+)", read("/etc/os-release"), re.MULTILINE)
    codename = own_release[1] if own_release else RELEASE
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
    stanzas = [archive.stanza(dict.fromkeys((release, suite)))]
    security = next((source for source in sources if source.has(f"{codename}-security")), None)
    if security is not None:
        stanzas.append(security.stanza([f"{release}-security"]))
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
            why="Debian's packages are fetched and unpacked with apt and dpkg",
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
    print(f"images/{Path(sys.argv[0]).name}: {words}", file=sys.stderr, flush=True)


def answer(description: str, versions: Iterable[str], provided: Callable[[str], Path]) -> int:
    """Prints what is provided for the version asked for; 1 and a reason if there is none."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("version", choices=sorted(versions))
    try:
        print(provided(parser.parse_args().version))
    except CannotProvideError as error:
        say(f"error: {error.what}: {error.why}")
        say(f"to do: {error.remedy}")
        return 1
    return 0
