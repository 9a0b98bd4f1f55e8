"""The documentation builds as a site: every page is in it, and a broken link ends the build."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))),
    reason="mkdocs is not installed: pip install '.[docs]'",
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, with the site elsewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site]
    return subprocess.run(command, cwd=site.parent, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_every_page_is_in_the_site_and_nothing_is_loaded_from_the_network(tmp_path):
    site = tmp_path / "site"
    done = build(ROOT / "mkdocs.yml", site)
    assert done.returncode == 0, done.stderr
    built = {file.relative_to(site).with_suffix("").as_posix() for file in site.rglob("*.html")}
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES}
    assert pages | {"404"} == {name for name in built if not name.startswith("results/")}
    for file in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|link)[^>]* (?:src|href)=.?(?:https?:)?//[^ >]*", file.read_text())
        assert not loaded, file.name
    # A page that is opened as a file has a search: an index that is a script, and a worker that is no file.
    start = (site / "index.html").read_text()
    assert '<script src="site/iframe-worker.js">' in start and (site / "site" / "iframe-worker.js").is_file()
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"openpi_train {version}</title>" in start
    # What comes from the code: a field with its comment, a docstring's arguments, the files' first sentences.
    configuration, api, files = (
        (site / "reference" / f"{name}.html").read_text() for name in ("configuration", "api", "files")
    )
    assert "Rows per optimizer step, over all devices." in configuration
    assert "merge low-rank factors into the weights" in api
    assert "<code>loop.py</code>" in files
    benchmarks = (site / "understand" / "benchmarks.html").read_text()
    results = {file.stem for file in (ROOT / "benchmarks" / "results").glob("*.md")}
    assert results == set(re.findall(r'href="\.\./results/(\w+)\.html"', benchmarks))


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        ("second.md#a-section", None),
        ("third.md", "third.md"),
        ("second.md#no-section", "no-section"),
        ("/second.md", "second.md"),
    ],
)
def test_a_broken_link_ends_the_build(tmp_path, link, complaint):
    done = build(small_project(tmp_path, f"[here]({link})", "[index.md, second.md]"), tmp_path / "site")
    assert (done.returncode == 0) == (complaint is None), done.stderr
    assert complaint is None or complaint in done.stderr


def test_a_page_that_is_not_in_the_navigation_ends_the_build(tmp_path):
    done = build(small_project(tmp_path, "", "[index.md]"), tmp_path / "site")
    assert done.returncode != 0
    assert "second.md" in done.stderr


def small_project(folder: Path, text: str, navigation: str) -> Path:
    """The config of two pages under the project's own settings of what a warning is, without its theme and plugins."""
    pages = folder / "docs"
    pages.mkdir()
    (pages / "index.md").write_text(f"# First\n\n{text}\n")
    (pages / "second.md").write_text("# Second\n\n## A section\n")
    config = folder / "mkdocs.yml"
    own = {"INHERIT": ROOT / "mkdocs.yml", "docs_dir": pages, "nav": navigation, "theme": "{name: mkdocs}"}
    own |= dict.fromkeys(("hooks", "plugins", "markdown_extensions"), "[]")
    config.write_text("".join(f"{name}: {value}\n" for name, value in own.items()))
    return config
