"""What `vmckpt store check` and `repair` found and did, in words and as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vmckpt.errors import VmckptError

if TYPE_CHECKING:
    from vmckpt.store.check import CheckReport
    from vmckpt.store.damage.repair import Repaired, RepairPlan
    from vmckpt.store.store import Store

_SHOWN = 5


class DamageOutput(NamedTuple):
    """JSON, lines, and the error that the command ends with, if any."""

    result: dict[str, Any]
    lines: list[str]
    error: VmckptError | None


def checked(store: "Store", report: "CheckReport") -> DamageOutput:
    """What a check found."""
    from vmckpt.store.errors import DamagedError

    names = sorted({finding.name for finding in report.findings})
    lines = [*_findings(report), _read(report, len(names))]
    error = None
    if not report.whole:
        if not report.noted:
            lines.append("none of this could be recorded: the store is read-only")
        remedy = "no checkpoint is lost: vmckpt store repair --apply"
        if report.lost:
            remedy = (
                "what is lost comes back when its content is stored again, as the VM's next "
                "checkpoint may do. `vmckpt store repair --apply --remove-lost` removes what "
                "cannot be restored, `vmckpt store copy` brings it from a store that has it: "
                f"{', '.join(report.lost)}"
            )
        error = DamagedError(
            f"the store {store.location} is damaged",
            why=f"{len(names)} files: {_some(names)}",
            remedy=remedy,
        )
    return DamageOutput(_result(store, report), lines, error)


def all_checked(found: Sequence[DamageOutput], silent: Sequence[VmckptError]) -> DamageOutput:
    """What checks of several stores found; `silent`: why others could not be checked."""
    lines = list[str]()
    for damage in found:
        lines += [f"{damage.result['place']}:", *(f"  {line}" for line in damage.lines)]
    lines += [f"not checked: {error.what}: {error.why}" for error in silent]
    result = {
        "whole": all(damage.result["whole"] for damage in found),
        "stores": [damage.result for damage in found],
        "silent": [{"what": one.what, "why": one.why, "remedy": one.remedy} for one in silent],
    }
    errors = [damage.error for damage in found if damage.error is not None]
    return DamageOutput(result, lines, next(iter([*errors, *silent]), None))


def planned(store: "Store", plan: "RepairPlan", *, remove_lost: bool) -> DamageOutput:
    """What repairing would do."""
    report = plan.report
    lines = [*_findings(report), _read(report, len({one.name for one in report.findings}))]
    if report.whole:
        return DamageOutput(_repair_result(store, plan), [*lines, "nothing to repair"], None)
    if plan.heals:
        lines.append(f"would heal {len(plan.heals)} packs: their content is elsewhere in the store")
    if plan.lost:
        verb = "would remove" if remove_lost else "kept without --remove-lost"
        lines.append(f"{verb}: {', '.join(plan.lost)}")
    if plan.refused is not None:
        lines.append(f"nothing can be healed before that: {plan.refused.why}")
    lines.append("nothing was changed: add --apply")
    return DamageOutput(_repair_result(store, plan), lines, None)


def repaired(store: "Store", plan: "RepairPlan", done: "Repaired") -> DamageOutput:
    """What repairing did."""
    from vmckpt.store.errors import DamagedError
    from vmckpt.units import format_size

    lines = [*_findings(plan.report)]
    if done.removed:
        lines.append(f"removed: {', '.join(done.removed)}")
    lines += [f"not removed: {one}: {why}" for one, why in done.kept.items()]
    lines += [f"not removed: {one}: it can be restored now" for one in done.restorable]
    if done.collected is not None:
        freed = format_size(max(0, done.collected.freed_bytes))
        lines.append(f"{done.collected.healed} chunks healed, {freed} freed")
        lines += [f"{p}: {n} chunks are still lost" for p, n in done.collected.lost.items()]
    if done.refused is not None:
        lines.append(f"nothing was healed: {done.refused.why}")
    left = [one for one in plan.lost if one not in (*done.removed, *done.restorable)]
    result = _repair_result(store, plan) | {
        "applied": True,
        "removed": done.removed,
        "not_removed": done.kept,
        "restorable": done.restorable,
        "healed_chunks": done.collected.healed if done.collected else 0,
        "lost_chunks": done.collected.lost if done.collected else {},
        "left": left,
    }
    error = None
    if left:
        error = DamagedError(
            f"the store {store.location} still has checkpoints that cannot be restored",
            why=_some(left),
            remedy="take a checkpoint of the VM, which may heal them, or remove them: "
            "--remove-lost (and copy them again from a store that has them); one that is pinned: "
            "vmckpt checkpoint unpin",
        )
    return DamageOutput(result, lines, error)


def _findings(report: "CheckReport") -> list[str]:
    lines = [f"{finding.name}: {finding.why}" for finding in report.findings]
    lost = report.lost.items()
    return lines + [f"cannot be restored: {one}: {'; '.join(why)}" for one, why in lost]


def _read(report: "CheckReport", damaged: int) -> str:
    from vmckpt.units import format_size

    part = "" if report.packs_read == report.packs else f"{report.packs_read} of "
    return (
        f"{report.checkpoints} checkpoints, {part}{report.packs} packs, "
        f"{format_size(report.read_bytes)} read: {damaged} files damaged"
    )


def _result(store: "Store", report: "CheckReport") -> dict[str, Any]:
    return {
        "place": store.location,
        "whole": report.whole,
        "checkpoints": report.checkpoints,
        "packs": report.packs,
        "packs_read": report.packs_read,
        "read_bytes": report.read_bytes,
        "recorded": report.noted,
        "findings": [{"name": f.name, "why": f.why} for f in report.findings],
        "lost": report.lost,
    }


def _repair_result(store: "Store", plan: "RepairPlan") -> dict[str, Any]:
    refused = plan.refused.why if plan.refused else None
    return _result(store, plan.report) | {
        "applied": False,
        "heals": plan.heals,
        "refused": refused,
    }


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:_SHOWN])}{', ...' if names[_SHOWN:] else ''}"
