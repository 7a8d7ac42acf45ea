"""Options, source and result of a restore."""

from dataclasses import dataclass
from typing import NamedTuple

from vmckpt.store.files.manifest import Manifest
from vmckpt.vm.identity import new_identity


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """Options of a restore. `name`: a copy's; None: the VM itself. `trust`: see `foreign.py`."""

    name: str | None
    in_place: bool
    eager: bool
    plugged: bool
    keep_macs: bool
    trust: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """A VM that runs from a checkpoint.

    Times count from the end of all checks, the last of which starts a QEMU (`preflight_ms`);
    `ran_unix_s` is when the guest ran.
    """

    vm: str
    host: str
    checkpoint: str
    preflight_ms: float
    disks_ms: float
    running_ms: float
    ran_unix_s: float
    warnings: tuple[str, ...]
    # Whether the guest was informed as far as possible (`identity.py`).
    settled: bool = False


class CheckpointSource(NamedTuple):
    """A checkpoint in a store; `secret` opens an encrypted one.

    `known` is the digest of what the operator inspected, if this site took it or it is trusted.
    """

    location: str
    checkpoint: str
    secret: bytes | None = None
    known: str = ""
    is_foreign: bool = True

    def identity_for(self, manifest: Manifest, name: str | None) -> str:
        """The VM's identity: the checkpoint's, or a new one for a copy (`name`).

        An untrusted checkpoint gets a new one too: a VM's uid follows from its identity
        (vm/users/users.py).
        """
        theirs = manifest.vm_id if name is None and self.known else None
        return theirs or new_identity()
