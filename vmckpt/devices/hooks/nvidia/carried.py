"""What a phase records for the next: the jobs that are carried, and how to restart them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from typing import Any

from vmckpt.devices.hooks.nvidia import system
from vmckpt.devices.hooks.nvidia.users import User, started


def read_state() -> dict[str, Any]:
    """The state that earlier phases recorded; empty if none has begun."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((system.STATE / "state.json").read_text())
        return found if isinstance(found, dict) else {}
    return {}


def write_state(state: dict[str, Any]) -> None:
    """Replace it atomically."""
    part = system.STATE / "state.part"
    part.write_text(json.dumps(state))
    part.rename(system.STATE / "state.json")


def forget() -> None:
    """Delete the state: nothing is carried."""
    (system.STATE / "state.json").unlink()


def remembered(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The jobs that are carried and still exist."""
    return [job for job in state.get("jobs", []) if started(job["pid"]) == job["start"]]


def about(user: User) -> dict[str, Any]:
    """What is needed to restart the job."""
    entry = system.PROC / str(user.pid)

    def words(name: str) -> list[str]:
        with contextlib.suppress(OSError):
            text = (entry / name).read_bytes().decode(errors="surrogateescape")
            return [word for word in text.split("\0") if word]
        return []

    job: dict[str, Any] = {"pid": user.pid, "start": user.start, "comm": user.comm}
    job["argv"], job["env"] = words("cmdline"), words("environ")
    job["cwd"], job["uid"], job["gid"], job["groups"], job["unit"] = "/", 0, 0, [], ""
    with contextlib.suppress(OSError):
        job["cwd"] = os.readlink(entry / "cwd")
    with contextlib.suppress(OSError):
        status = system.read_text(entry / "status")
        for key, name in (("uid", "Uid"), ("gid", "Gid")):
            # The process's name comes first, and may look like this line: the last match is the
            # kernel's.
            shown = re.findall(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
            job[key] = int(shown[-1]) if shown else 0
        groups = re.findall(r"^Groups:((?:[ \t]+\d+)*)", status, re.MULTILINE)
        job["groups"] = [int(group) for group in groups[-1].split()] if groups else []
    with contextlib.suppress(OSError):
        text = system.read_text(entry / "cgroup")
        found = re.search(r"/([^/\s]+\.service)$", text, re.MULTILINE)
        # Those of a user's own systemd are unknown to the guest's.
        job["unit"] = found[1] if found and "/user.slice/" not in text else ""
    return job


def begin_anew(job: dict[str, Any]) -> str:
    """Make sure that the job has ended, and start it again; returns its description."""
    who = f"{' '.join(job['argv']) or job['comm']} (process {job['pid']})"
    with contextlib.suppress(OSError):
        os.kill(job["pid"], signal.SIGKILL)
    if job["unit"]:
        system.run("systemctl", "restart", job["unit"], check=False)
    elif job["argv"]:
        environment = dict(word.split("=", 1) for word in job["env"] if "=" in word)
        try:
            subprocess.Popen(
                job["argv"], cwd=job["cwd"], env=environment, user=job["uid"], group=job["gid"],
                extra_groups=job.get("groups", []), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as exc:
            return f"{who}, which does not start again ({exc})"
    return who
