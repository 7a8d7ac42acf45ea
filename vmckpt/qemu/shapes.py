"""The shapes of what QEMU says, as far as vmckpt reads it (QEMU's qapi/*.json). Checked once, here.

A QEMU that was broken into, or another program behind its socket, says what it likes. Whoever reads
an answer reads it without checks of its own: what it reads by `[...]` has to be in its shape.
"""

from collections.abc import Mapping
from typing import Final

from vmckpt.foreign import NUMBER, Shape

_NAMED: Final[Shape] = [{"name": str}]
_CHILDREN: Final[Shape] = [{"name": str, "type": str}]
_FUNCTION: Final[dict[str, Shape]] = {"bus": int, "slot": int, "function": int, "qdev_id": str}
_FUNCTION["pci_bridge?"] = {"devices?": [_FUNCTION]}
_IMAGE: Final[dict[str, Shape]] = {
    "filename": str,
    "virtual-size": int,
    "actual-size?": int,
    "snapshots?": [
        {
            "name": str,
            "id": str,
            "vm-state-size": int,
            "date-sec": int,
            "vm-clock-sec": int,
            "vm-clock-nsec": int,
        }
    ],
}
_IMAGE["backing-image?"] = _IMAGE

# By command. What is not here is read by nothing, or checked where it is read (qom-get).
RETURNS: Final[Mapping[str, Shape]] = {
    "query-version": {"qemu": {"major": int, "minor": int, "micro": int}},
    "query-status": {"status": str, "running": bool},
    # A machine without a processor is none.
    "query-cpus-fast": ({"thread-id": int, "qom-path": str},),
    "query-pci": [{"devices": [_FUNCTION]}],
    "qom-list": _CHILDREN,
    "query-machines": [{"name": str, "alias?": str, "default-ram-id?": str}],
    "query-cpu-definitions": _NAMED,
    "query-kvm": {"enabled": bool},
    "query-qmp-schema": [
        {
            "name": str,
            "meta-type": str,
            "arg-type?": str,
            "members?": [{"name?": str, "type?": str}],
            "values?": [str],
        }
    ],
    "query-commands": _NAMED,
    "query-migrate-capabilities": [{"capability": str, "state": bool}],
    "query-migrate-parameters": {
        "max-cpu-throttle?": int,
        "cpu-throttle-initial?": int,
        "max-bandwidth?": int,
        "downtime-limit?": int,
        "tls-creds?": str,
        "tls-hostname?": str,
        "tls-authz?": str,
    },
    "query-migrate": {
        "status?": str,
        "error-desc?": str,
        "downtime?": int,
        "expected-downtime?": int,
        "cpu-throttle-percentage?": int,
        "postcopy-blocktime?": int,
        "socket-address?": [{"type?": str, "port?": str}],
        "blocked-reasons?": [str],
        "ram?": {
            "page-size?": int,
            "total?": int,
            "remaining?": int,
            "transferred?": int,
            "mbps?": NUMBER,
            "dirty-pages-rate?": int,
            "dirty-sync-count?": int,
            "postcopy-requests?": int,
            "normal?": int,
            "duplicate?": int,
        },
    },
    "query-dirty-rate": {"status": str, "dirty-rate?": int},
    "query-yank": [{"type": str, "node-name?": str, "id?": str}],
    "query-jobs": [
        {
            "id": str,
            "type": str,
            "status": str,
            "current-progress": int,
            "total-progress": int,
            "error?": str,
        }
    ],
    "query-block-jobs": [{"device": str, "io-status": str}],
    "query-named-block-nodes": [
        {
            "node-name": str,
            "image": _IMAGE,
            "dirty-bitmaps?": [{"name?": str, "recording": bool, "inconsistent?": bool}],
        }
    ],
    "query-block": [
        {
            "device": str,
            "qdev?": str,
            "inserted?": {
                "node-name?": str,
                "drv?": str,
                "file?": str,
                "ro?": bool,
                "cache?": {"direct?": bool},
            },
        }
    ],
    "x-debug-query-block-graph": {
        "nodes": [{"id": int, "name": str}],
        "edges": [{"name": str, "parent": int, "child": int}],
    },
    "x-query-virtio-queue-status": {"used-idx": int},
    "query-chardev": [{"label": str}],
    "query-memory-size-summary": {"base-memory": int},
    "query-target": {"arch": str},
    "human-monitor-command": str,
    "device-list-properties": _CHILDREN,
    "x-query-ramblock": {"human-readable-text": str},
    "add-fd": {"fdset-id": int},
}

# By event, of its data.
EVENTS: Final[Mapping[str, Shape]] = {
    "MIGRATION": {"status": str},
    "MIGRATION_PASS": {"pass": int},
    "JOB_STATUS_CHANGE": {"id": str, "status": str},
    "BLOCK_JOB_ERROR": {"device": str, "operation": str},
    "SHUTDOWN": {"guest": bool},
    "DEVICE_DELETED": {"device?": str},
    "DEVICE_UNPLUG_GUEST_ERROR": {"device?": str},
}

# Of `qom-get`, whose answer depends on the property.
TEXT: Final[Shape] = str
FEATURE_WORDS: Final[Shape] = [
    {"features": int, "cpuid-input-eax": int, "cpuid-register": str, "cpuid-input-ecx?": int}
]
