"""One thing looked at before a migration, and what was found."""

from typing import NamedTuple

OK, WARN, REFUSE = "ok", "warn", "refuse"


class Check(NamedTuple):
    """`verdict` is ok, warn or refuse; `remedy` is empty when all is well."""

    code: str
    verdict: str
    reason: str
    remedy: str = ""
