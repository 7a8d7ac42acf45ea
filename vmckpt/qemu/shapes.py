"""The parts of QEMU's answers and events that vmckpt reads (QEMU's qapi/*.json), as types.

A compromised QEMU, or another program behind its socket, may send anything. `Monitor` converts each
answer to its type, so its readers need no checks. Names are QEMU's, so the types are dicts;
`replies` has the values made from them.
"""
# ruff: noqa: UP013 - one form for all, whether or not their names are Python's

from collections.abc import Mapping
from typing import Any, Final, NotRequired, TypedDict

Version = TypedDict("Version", {"major": int, "minor": int, "micro": int})
VersionInfo = TypedDict("VersionInfo", {"qemu": Version})
StatusInfo = TypedDict("StatusInfo", {"status": str, "running": bool})
CpuInfo = TypedDict("CpuInfo", {"thread-id": int, "qom-path": str})
PciBridge = TypedDict("PciBridge", {"devices": NotRequired[list["PciFunction"]]})
PciFunction = TypedDict(
    "PciFunction",
    {
        "bus": int,
        "slot": int,
        "function": int,
        "qdev_id": str,
        "pci_bridge": NotRequired[PciBridge],
    },
)
PciBus = TypedDict("PciBus", {"devices": list[PciFunction]})
Named = TypedDict("Named", {"name": str})
Child = TypedDict("Child", {"name": str, "type": str})
Property = TypedDict("Property", {"name": str, "type": str, "default-value": NotRequired[Any]})
FeatureWord = TypedDict(
    "FeatureWord",
    {
        "features": int,
        "cpuid-input-eax": int,
        "cpuid-register": str,
        "cpuid-input-ecx": NotRequired[int],
    },
)
MachineInfo = TypedDict(
    "MachineInfo", {"name": str, "alias": NotRequired[str], "default-ram-id": NotRequired[str]}
)
KvmInfo = TypedDict("KvmInfo", {"enabled": bool})
TargetInfo = TypedDict("TargetInfo", {"arch": str})
MemorySize = TypedDict("MemorySize", {"base-memory": int, "plugged-memory": NotRequired[int]})

# Of query-memdev; QEMU's own back end, of `-m` alone, has an id, too.
# Of other kinds than "dimm" the data is other data.
Dimm = TypedDict("Dimm", {"id": str, "addr": int, "slot": int}, total=False)
MemoryDevice = TypedDict("MemoryDevice", {"type": str, "data": Dimm})
MemoryBackEnd = TypedDict("MemoryBackEnd", {"id": NotRequired[str], "size": int})
ChardevInfo = TypedDict("ChardevInfo", {"label": str})
SchemaMember = TypedDict("SchemaMember", {"name": str, "type": str}, total=False)
SchemaInfo = TypedDict(
    "SchemaInfo",
    {
        "name": str,
        "meta-type": str,
        "arg-type": NotRequired[str],
        "members": NotRequired[list[SchemaMember]],
        "values": NotRequired[list[str]],
    },
)
Capability = TypedDict("Capability", {"capability": str, "state": bool})
SocketAddress = TypedDict("SocketAddress", {"type": str, "port": str}, total=False)
MigrationRam = TypedDict(
    "MigrationRam",
    {
        "page-size": int,
        "total": int,
        "remaining": int,
        "transferred": int,
        "mbps": float,
        "dirty-pages-rate": int,
        "dirty-sync-count": int,
        "postcopy-requests": int,
        "normal": int,
        "duplicate": int,
    },
    total=False,
)
MigrationInfo = TypedDict(
    "MigrationInfo",
    {
        "status": str,
        "error-desc": str,
        "downtime": int,
        "expected-downtime": int,
        "cpu-throttle-percentage": int,
        "postcopy-blocktime": int,
        "socket-address": list[SocketAddress],
        "blocked-reasons": list[str],
        "ram": MigrationRam,
    },
    total=False,
)
DirtyRate = TypedDict("DirtyRate", {"status": str, "dirty-rate": NotRequired[int]})
Yankable = TypedDict(
    "Yankable", {"type": str, "node-name": NotRequired[str], "id": NotRequired[str]}
)
JobInfo = TypedDict(
    "JobInfo",
    {
        "id": str,
        "type": str,
        "status": str,
        "current-progress": int,
        "total-progress": int,
        "error": NotRequired[str],
    },
)
BlockJob = TypedDict("BlockJob", {"device": str, "io-status": str})
SnapshotInfo = TypedDict(
    "SnapshotInfo",
    {
        "name": str,
        "id": str,
        "vm-state-size": int,
        "date-sec": int,
        "vm-clock-sec": int,
        "vm-clock-nsec": int,
    },
)
Image = TypedDict(
    "Image",
    {
        "filename": str,
        "virtual-size": int,
        "actual-size": NotRequired[int],
        "snapshots": NotRequired[list[SnapshotInfo]],
        "backing-image": NotRequired["Image"],
    },
)
Bitmap = TypedDict(
    "Bitmap", {"name": NotRequired[str], "recording": bool, "inconsistent": NotRequired[bool]}
)
NamedNode = TypedDict(
    "NamedNode", {"node-name": str, "image": Image, "dirty-bitmaps": NotRequired[list[Bitmap]]}
)
Cache = TypedDict("Cache", {"direct": bool}, total=False)
Inserted = TypedDict(
    "Inserted",
    {"node-name": str, "drv": str, "file": str, "ro": bool, "cache": Cache},
    total=False,
)
BlockInfo = TypedDict(
    "BlockInfo", {"device": str, "qdev": NotRequired[str], "inserted": NotRequired[Inserted]}
)
GraphNode = TypedDict("GraphNode", {"id": int, "name": str})
GraphEdge = TypedDict("GraphEdge", {"name": str, "parent": int, "child": int})
BlockGraph = TypedDict("BlockGraph", {"nodes": list[GraphNode], "edges": list[GraphEdge]})
VirtioInfo = TypedDict("VirtioInfo", {"name": str, "path": str})
QueueStatus = TypedDict("QueueStatus", {"used-idx": int})
HumanText = TypedDict("HumanText", {"human-readable-text": str})
FdSet = TypedDict("FdSet", {"fdset-id": int})

_Migration = TypedDict("_Migration", {"status": str})
_Pass = TypedDict("_Pass", {"pass": int})
_JobStatus = TypedDict("_JobStatus", {"id": str, "status": str})
_BlockError = TypedDict("_BlockError", {"device": str, "operation": str})
_Shutdown = TypedDict("_Shutdown", {"guest": bool})
_Device = TypedDict("_Device", {"device": str}, total=False)
# The type of each event's data.
EVENTS: Final[Mapping[str, type]] = {
    "MIGRATION": _Migration,
    "MIGRATION_PASS": _Pass,
    "JOB_STATUS_CHANGE": _JobStatus,
    "BLOCK_JOB_ERROR": _BlockError,
    "SHUTDOWN": _Shutdown,
    "DEVICE_DELETED": _Device,
    "DEVICE_UNPLUG_GUEST_ERROR": _Device,
}
