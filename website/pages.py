"""Pages of the website: those of the source tree, and the command line's, made from itself.

MkDocs calls the functions `on_...` (mkdocs.yml, hooks).
"""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from vmckpt.cli.tree.described import CommandLine, Described, described
from vmckpt.cli.tree.results import results_page

ROOT = Path(__file__).resolve().parents[1]
_PUBLISHED = (
    "*.md",
    "docs/**/*.md",
    "docs/*.svg",
    "vmckpt/**/README.md",
    "ansible/**/README.md",
    "tests/README.md",
    "images/README.md",
    "benchmarks/NOTES.md",
)


def on_config(config: MkDocsConfig) -> None:
    """Give headings the anchors that code hosts give them, by which pages link to them."""
    config.mdx_configs["toc"] = {"permalink": True, "slugify": anchor}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by all pages, each under its path in the tree."""
    chosen = [file for file in files if file.src_dir != config.docs_dir]  # the theme's
    for path in (path for pattern in _PUBLISHED for path in sorted(ROOT.glob(pattern))):
        name = path.relative_to(ROOT).as_posix()
        chosen.append(File.generated(config, name, abs_src_path=str(path)))
    for name, text in commands(described()).items():
        chosen.append(File.generated(config, f"commands/{name}", content=text))
    chosen.append(File.generated(config, "commands/results.md", content=results_page()))
    return Files(chosen)


def anchor(heading: str, separator: str) -> str:
    """Letters and digits of a heading in lower case, its spaces as `separator`."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def commands(line: CommandLine) -> dict[str, str]:
    """The text of a page for each command, and of one about all of them, by file name."""
    made = {_file(one): _page(one) for group in line.sections.values() for one in group}
    return {"README.md": _overview(line), **made}


def _overview(line: CommandLine) -> str:
    text = ["# Command line", *_of(line.root)]
    for title, group in line.sections.items():
        rows = [f"| [{one.words}]({_file(one)}) | {_html(one.summary)} |" for one in group]
        text += [f"## {title}", "\n".join(["| command | |", "|---|---|", *rows])]
    rows = [f"| {code} | {_html(meaning)} |" for code, meaning in line.exit_codes]
    text += ["## Exit codes", "\n".join(["| code | meaning |", "|---|---|", *rows])]
    text.append("More: [exit codes and JSON](../docs/exit-codes-and-json.md).")
    return "\n\n".join(text) + "\n"


def _page(command: Described) -> str:
    text = [f"# {command.words}", *_of(command)]
    for one in command.commands:
        text += [f"## {one.words}", *_of(one)]
    return "\n\n".join(text) + "\n"


def _of(command: Described) -> Iterator[str]:
    yield f"    {command.words} {command.usage}"
    yield "\n".join(f"<p>{_html(one)}</p>" for one in command.paragraphs)
    if command.examples:
        yield "\n".join(f"    {one}" for one in command.examples)
    if command.options:
        options = (
            f"<dt><code>{escape(term)}</code></dt><dd>{_html(meaning)}</dd>"
            for term, meaning in command.options
        )
        yield "\n".join(["<dl>", *options, "</dl>"])


def _file(command: Described) -> str:
    return f"{command.words.split()[-1]}.md"


def _html(words: str) -> str:
    """Text of `--help`, which marks up code alone."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words, quote=False))
