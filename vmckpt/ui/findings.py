"""Findings as text: a table, and what to do about each problem."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vmckpt.ui.shown import one_line
from vmckpt.ui.tables import beneath, table

if TYPE_CHECKING:
    from vmckpt.preflight.finding import Finding


def findings_text(checks: "Sequence[Finding]") -> str:
    """The table, followed by the problems with their remedies."""
    rows = [(check.verdict, check.code, check.reason) for check in checks]
    found = table(("verdict", "check", "reason"), rows)
    text = problems_text(checks)
    return f"{found}\n\n{text}" if text else found


def problems_text(checks: "Sequence[Finding]") -> str:
    """Each problem, with its remedy on a separate line, for copying; empty without problems."""
    from vmckpt.preflight.finding import OK

    return "\n\n".join(
        beneath(f"  {check.verdict}  {check.code}: {one_line(check.reason)}", " " * 4)
        + f"\n{one_line(check.remedy)}"
        for check in checks
        if check.verdict != OK
    )
