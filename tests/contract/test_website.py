"""The website is built with all links checked, and its pages load nothing from elsewhere."""

import inspect
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.unit.test_language import COMMANDS
from vmckpt.cli.tree.results import RESULTS

pytestmark = pytest.mark.contract
ROOT = Path(__file__).parents[2]
_LOADS = {
    "audio": "src", "embed": "src", "iframe": "src", "image": "href", "img": "src",
    "input": "src", "link": "href", "object": "data", "script": "src", "source": "src",
    "use": "href", "video": "src",
}  # fmt: skip
_IN_CSS = re.compile(r"(?:url\(|@import)\s*[\"']?\s*((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


class _Loaded(HTMLParser):
    """Addresses on other machines that a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            loads = name.removeprefix("xlink:") == _LOADS.get(tag) or name == "srcset"
            if loads and re.search(r"(?:^|[\s,])(?:https?:)?//", value or ""):
                self.found.append(value or "")
            if name == "style":
                self.found += _IN_CSS.findall(value or "")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "style":
            self.found += _IN_CSS.findall(data)


def loaded(file: str, text: str) -> list[str]:
    if file.endswith(".css"):
        return _IN_CSS.findall(text)
    page = _Loaded()
    page.feed(text)
    return page.found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as by `make docs`: a link or an anchor that leads nowhere aborts it."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "website/mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    files = [one for one in site.rglob("*") if one.suffix in (".html", ".css", ".svg")]
    assert {one.suffix for one in files} == {".html", ".css", ".svg"}
    found = {one: loaded(one.name, one.read_text()) for one in files}
    assert {one.name: addresses for one, addresses in found.items() if addresses} == {}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.html", '<script src="https://cdn.example/a.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//cdn.example/a.css">'),
        ("a.html", '<img srcset="a.png 1x, http://cdn.example/b.png 2x">'),
        ("a.html", "<style>@font-face { src: url('https://cdn.example/a.woff2') }</style>"),
        ("a.svg", '<svg><image xlink:href="http://cdn.example/a.png"/></svg>'),
        ("a.css", '@import "https://cdn.example/a.css";'),
    ],
)
def test_what_a_page_would_load_is_found(file: str, text: str) -> None:
    assert len(loaded(file, text)) == 1


def test_a_link_to_elsewhere_is_no_load() -> None:
    assert loaded("a.html", '<a href="https://semver.org/">x</a><img src="a.png">') == []


def test_every_page_of_the_tree_is_there(site: Path) -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "vmckpt").rglob("README.md")]
    for page in pages:
        path = page.relative_to(ROOT)
        name = "index.html" if path.stem == "README" else f"{path.stem}.html"
        assert (site / path.with_name(name)).is_file(), path


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_and_option_is_in_the_reference(words: str, site: Path) -> None:
    command = COMMANDS[words]
    text = (site / "commands" / f"{(words.split() or ['index'])[0]}.html").read_text()
    context = click.Context(command, info_name=f"vmckpt {words}".strip())
    records = [param.get_help_record(context) for param in command.params]
    if words.count(" ") == 1 and isinstance(command, click.Group):
        return  # its commands are there
    assert f">{context.command_path}<a " in text or not words
    for record in records:
        assert record is None or f"<dt><code>{escape(record[0])}</code></dt>" in text


@pytest.mark.parametrize("what", RESULTS)
def test_every_field_of_a_result_is_in_the_reference(what: str, site: Path) -> None:
    text = (site / "commands/results.html").read_text()
    begins = text.index(f">{what}<a ")
    part = text[begins : text.find("<h2", begins)]
    for name in inspect.get_annotations(RESULTS[what]):
        assert f"<td><code>{name}</code></td>" in part, name
    assert "ForwardRef" not in part
    assert "None" not in re.findall(r"<td><code>(.*?)</code></td>", part)


def test_each_part_of_the_documentation_is_in_the_menu(site: Path) -> None:
    text = (site / "index.html").read_text()
    for part in ("Tutorial", "How-to", "Reference", "Explanation"):
        assert re.search(rf'class="nav-link[^>]*>{part}</a>', text), part
