"""A migration as people script it: QMP and nothing else, in one process.

What `vmckpt migrate` is measured against (benchmarks/overhead.py). It checks nothing beforehand,
undoes nothing, leaves no record, and so does the least that moves a running VM: start the target
QEMU, set both sides, migrate, wait for the event, end the source. The target's argument vector is
given, without `-S`: it runs by itself as soon as it has everything.

    python -m benchmarks.bare_migrate PLAN.json

PLAN.json has the fields of Plan. Prints one JSON object: QEMU's own figures of the migration.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qemu.qmp import ConnectError, QMPClient, QMPError

POLL_S = 0.002
TIMEOUT_S = 60.0
CAPABILITIES = ("return-path", "events", "auto-converge")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the script needs to know. Argument vectors begin with the namespace's prefix."""

    source_monitor: str
    source_ram_file: str
    target_argv: list[str]
    target_monitor: str
    target_stderr: str
    target_address: str
    downtime_limit_ms: int
    plug_argv: list[str]


async def move(plan: Plan) -> dict[str, Any]:
    """Move the VM; QEMU's own account of it. Any error ends the script."""
    start_target(plan)
    source, target = await asyncio.gather(
        connect(plan.source_monitor), connect(plan.target_monitor)
    )
    plug(plan)
    capabilities = [{"capability": name, "state": True} for name in CAPABILITIES]
    parameters = {"max-bandwidth": 0, "downtime-limit": plan.downtime_limit_ms}
    for client in (source, target):
        await client.execute("migrate-set-capabilities", {"capabilities": capabilities})
        await client.execute("migrate-set-parameters", parameters)
    await target.execute("migrate-incoming", {"uri": f"tcp:{plan.target_address}:0"})
    listens = (await ask(target, "query-migrate"))["socket-address"][0]
    with source.listener("MIGRATION") as events:
        await source.execute("migrate", {"uri": f"tcp:{listens['host']}:{listens['port']}"})
        async for event in events:
            told: Any = event["data"]
            if told["status"] == "failed":
                raise SystemExit("the migration failed")
            if told["status"] == "completed":
                break
    account = await ask(source, "query-migrate")
    await source.execute("quit")
    Path(plan.source_ram_file).unlink()
    with contextlib.suppress(EOFError, QMPError):  # a QEMU that quits hangs up
        await source.disconnect()
    await target.disconnect()
    return account


def start_target(plan: Plan) -> None:
    """Start the target QEMU, which outlives the script."""
    with Path(plan.target_stderr).open("ab") as stderr:
        subprocess.Popen(
            plan.target_argv,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
        )


def plug(plan: Plan) -> None:
    """Put the target's tap on its bridge."""
    subprocess.run(plan.plug_argv, check=True)


async def connect(path: str) -> QMPClient:
    """A session with the QEMU behind `path`, which may be just starting."""
    while True:
        client = QMPClient()
        try:
            await client.connect(path)
        except ConnectError:
            await asyncio.sleep(POLL_S)
        else:
            return client


async def ask(client: QMPClient, command: str) -> dict[str, Any]:
    """A command's reply, which is an object."""
    reply: Any = await client.execute(command)
    return dict(reply)


async def main() -> None:
    """Run the plan named on the command line."""
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    async with asyncio.timeout(TIMEOUT_S):
        account = await move(plan)
    print(
        json.dumps(
            {
                "downtime_ms": account["downtime"],
                "total_time_s": account["total-time"] / 1e3,
                "transferred_bytes": account["ram"]["transferred"],
                "rounds": account["ram"]["dirty-sync-count"],
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main())
