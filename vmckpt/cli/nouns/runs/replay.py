"""vmckpt runs replay."""

from pathlib import Path
from typing import Annotated

from vmckpt.cli.options.arguments import RunId
from vmckpt.cli.options.together import option_of
from vmckpt.cli.output import Json, show
from vmckpt.options.migration import MigrationOptions


def replay(
    run: RunId,
    policy: Annotated[Path, option_of(MigrationOptions, "policy")],
    json: Json = False,
) -> None:
    """Show what a policy would have done in a past migration."""
    from vmckpt.errors import UsageError
    from vmckpt.events.record import RunRecord
    from vmckpt.forecast.model.pilot import replay as play
    from vmckpt.hosts.inventory.directories import runs_dir
    from vmckpt.hosts.inventory.inventory import check_name
    from vmckpt.options.reading import policy as read_policy
    from vmckpt.ui.tables import table

    rules = read_policy(policy)
    record = RunRecord.load(runs_dir() / f"{check_name(run, 'run')}.json")
    allowed_ms = record.request.get("max_downtime_ms")
    if not isinstance(allowed_ms, int):
        raise UsageError(
            f"run '{run}' is not a migration",
            why=f"it is of '{record.operation}': policies apply to migrations",
            remedy="name another: vmckpt runs list",
        )
    decisions = play(rules, allowed_ms, record.samples)
    rows = [
        (f"{at_s:.2f} s", decision.act.value, decision.words, decision.why)
        for at_s, decision in decisions
    ]
    came = str((record.result or {}).get("outcome", "no end recorded"))
    text = table(("at", "act", "what", "why"), rows) if rows else "it would do nothing"
    facts = [{"at_s": at_s, **decision._asdict()} for at_s, decision in decisions]
    result = {"run": run, "outcome": came, "decisions": facts}
    show(result, f"{text}\n(without it: {came})", as_json=json)
