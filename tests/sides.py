"""Sides of a replication, as their services tell of them."""

from pathlib import Path
from typing import Any

from vmckpt.hosts.local import LocalHost
from vmckpt.replicate.operator.sides import ReplicaSide
from vmckpt.replicate.status import ReplicaStatus


def side(*, host: str, answers: bool, **said: Any) -> ReplicaSide:
    """One that came from the service on `host`."""
    there = LocalHost(host, Path("/nowhere"), "127.0.0.1")
    return ReplicaSide(there, ReplicaStatus.from_json(said), answers)
