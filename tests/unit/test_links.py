"""What documents refer to exists: linked files and headings, and modules of vmckpt."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
FOLDERS = ("", "ansible", "benchmarks", "docs", "images", "tests", "vmckpt")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_MODULE = re.compile(r"`([\w./-]+/[\w-]+\.py)`")
_CODE = re.compile(r"^( {4}|```).*|`[^`\n]*`", re.MULTILINE)


def documents() -> Iterator[Path]:
    """All Markdown of the repository but what was built or installed there."""
    for folder in FOLDERS:
        yield from (ROOT / folder).glob("**/*.md" if folder else "*.md")


def anchors(text: str) -> set[str]:
    """The headings, as GitHub names them in links."""
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def broken(document: Path) -> Iterator[str]:
    """Links that lead nowhere."""
    for link in _LINK.findall(_CODE.sub("", document.read_text())):
        path, _, anchor = link.partition("#")
        if ":" in path:
            continue
        target = (document.parent / unquote(path)).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield f"{document.relative_to(ROOT)}: {link}"


def missing(document: Path) -> Iterator[str]:
    """Modules that are named with their folder, and are not there (any longer)."""
    roots = (ROOT, ROOT / "vmckpt", document.parent, document.parent.parent)
    for module in _MODULE.findall(document.read_text()):
        if not any((root / module).is_file() for root in roots):
            yield f"{document.relative_to(ROOT)}: {module}"


def test_links_between_documents_lead_somewhere() -> None:
    found = list(documents())
    assert ROOT / "ARCHITECTURE.md" in found
    assert [link for document in found for link in broken(document)] == []


def test_modules_that_documents_name_exist() -> None:
    found = [ROOT / "ARCHITECTURE.md", *(ROOT / "vmckpt").glob("**/*.md")]
    found += [*(ROOT / "docs/decisions").glob("*.md"), *(ROOT / "docs/formats").glob("*.md")]
    assert [module for document in found for module in missing(document)] == []
