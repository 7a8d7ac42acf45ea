"""vmckpt config."""

import os

from vmckpt.cli.output import Json, show


def config(json: Json = False) -> None:
    """Show the defaults set in files and the environment."""
    import typer.main

    from vmckpt.cli.main import COMMANDS, NOUNS, command_line
    from vmckpt.cli.tree.defaults import settings
    from vmckpt.state.config_files import files
    from vmckpt.ui.tables import table

    root = typer.main.get_group(command_line([]))
    # For the same option the last one counts.
    found = {(one.command, one.option): one for one in settings(root, (*COMMANDS, *NOUNS))}
    rows = [
        (" ".join(one.command), f"--{one.option}", str(one.value), one.origin)
        for one in found.values()
    ]
    there = dict(zip(files(), map(os.path.exists, files()), strict=True))
    lines = [f"{path}: {'read' if exists else 'not there'}" for path, exists in there.items()]
    text = table(("command", "option", "default", "from"), rows) if rows else "no defaults are set"
    facts = {
        "files": [{"path": str(path), "exists": exists} for path, exists in there.items()],
        "settings": [one._asdict() | {"command": " ".join(one.command)} for one in found.values()],
    }
    show(facts, "\n".join([*lines, "", text]), as_json=json)
