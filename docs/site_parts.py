"""What the site has beyond its pages: the list of files, results of benchmarks, comments above fields as descriptions.

`mkdocs.yml` names both: as a hook of mkdocs, and as an extension of griffe, which reads the docstrings.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import griffe
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("openpi_train", "configs", "benchmarks")
RESULTS = ROOT / "benchmarks" / "results"
# A class that a page of the reference names, with its file.
CLASS = re.compile(r"\[`(\w+)`\]\(\.\./\.\./(openpi_train/[\w/]+)\.py\)")

# The beginning of a flag in the text of a page, not in a tag.
FLAG = re.compile(r"(?<![\w-])--\w(?=[^<>]*<)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """mkdocs' hook: the version beside the name, and the link to the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name = f"{config.site_name} {project['version']}"
    config.repo_url = project.get("urls", {}).get("Repository")
    config.repo_name = config.repo_url and config.repo_url.split("//")[1].split("/", 1)[1]
    return config


def on_files(files: Files, config, **_) -> Files:
    """mkdocs' hook: each result of a benchmark is a page."""
    for result in sorted(RESULTS.glob("*.md")):
        files.append(File.generated(config, f"results/{result.name}", abs_src_path=str(result)))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """mkdocs' hook: the lists of files and of results; links between docs and results, and the source of a result."""
    if page.file.src_uri == "reference/files.md":
        return f"{markdown}\n{files()}"
    if page.file.src_uri == "reference/configuration.md":
        return with_fields(markdown)
    if page.file.src_uri == "understand/benchmarks.md":
        markdown = f"{markdown}\n{results()}"
    if page.file.src_uri.startswith("results/"):
        source = f"{page.meta['date']}, {page.meta['hardware']}, commit {page.meta['commit']}: `{page.meta['command']}`"
        back = "All results: [Benchmarks](../understand/benchmarks.md)"
        return markdown.replace("](../../docs/", "](../") + f"\n\n{source}\n\n{back}\n"
    return markdown.replace("](../../benchmarks/results/", "](../results/")


def on_page_content(html: str, page, **_) -> str:
    """mkdocs' hook: no line ends within the `--` of a flag; a search finds results and changes after other pages."""
    if page.file.src_uri.startswith(("results/", "reference/changelog")):
        page.meta["search"] = {"boost": 0.2}
    return FLAG.sub(r'<span class="flag">\g<0></span>', html)


def results() -> str:
    """Every result of a benchmark by its title, with hardware and date; those of the same hardware are together."""
    lines = []
    for result in sorted(RESULTS.glob("*.md")):
        _, top, body = result.read_text().split("---\n", 2)
        source, title = yaml.safe_load(top), body.strip().splitlines()[0].removeprefix("# ")
        lines.append((source["hardware"], f"[{title}](../results/{result.name})", source["date"]))
    rows = [f"| {title} | {hardware} | {date} |" for hardware, title, date in sorted(lines)]
    return "\n".join(["| result | hardware | date |", "|---|---|---|", *rows])


def files() -> str:
    """Every file with the first sentence of its docstring, a table per folder."""
    tables: dict[Path, list[str]] = {}
    for file in [one for name in FOLDERS for one in sorted((ROOT / name).rglob("*.py"))]:
        docstring = ast.get_docstring(ast.parse(file.read_text()))
        if docstring:
            line = f"| `{file.name}` | {first_sentence(docstring)} |"
            tables.setdefault(file.parent.relative_to(ROOT), []).append(line)
    head = "| file | what |\n|---|---|"
    return "\n\n".join("\n".join([f"## {folder}/\n", head, *lines]) for folder, lines in tables.items())


def with_fields(markdown: str) -> str:
    """The page with a section for every class that it names, to which the name leads."""
    full_names = {found[0]: f"{found[2].replace('/', '.')}.{found[1]}" for found in CLASS.finditer(markdown)}
    for link, name in full_names.items():
        markdown = markdown.replace(link, f"[`{name.rpartition('.')[2]}`](#{name})")
    sections = [f"::: {name}\n    options: {{members: false, show_signature: false}}" for name in full_names.values()]
    return "\n\n".join([markdown, "## Fields", *sections])


def first_sentence(docstring: str) -> str:
    """Up to the first full stop, in one line."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.) (?=[A-Z])", paragraph)[0].replace("|", "\\|")


class FieldComments(griffe.Extension):
    """griffe's extension: a class gets a table of its fields, each with the comment above it (its flag's help)."""

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        """Write the tables into the docstrings of the package's classes, inherited fields included."""
        for one in filter(lambda found: found.docstring, classes(pkg)):
            own = list(one.attributes.values())
            if "dataclass" not in one.labels:
                describe(one, "Attributes", own)
                continue
            inherited = [field for base in reversed(one.mro()) for field in base.attributes.values()]
            # griffe takes a field of the instance for an argument of `__init__`, and a ClassVar for none.
            describe(one, "Parameters", [field for field in [*inherited, *own] if "instance-attribute" in field.labels])
            describe(one, "Attributes", [field for field in own if "instance-attribute" not in field.labels])


def describe(one: griffe.Class, title: str, fields: list[griffe.Attribute]) -> None:
    """Add a section to the class's docstring: a line for each field that has a comment."""
    comments = {field.name: comment for field in fields if (comment := comment_above(field))}
    if comments:
        lines = [f"    {name}: {comment}" for name, comment in comments.items()]
        one.docstring.value = "\n".join([one.docstring.value, "", f"{title}:", *lines])


def classes(module: griffe.Module) -> Iterator[griffe.Class]:
    """The classes that a module and those below it define."""
    for member in module.members.values():
        if member.is_alias:  # an import: it may lead back to where we are
            continue
        if member.is_class:
            yield member
        elif member.is_module:
            yield from classes(member)


def comment_above(field: griffe.Attribute) -> str:
    """The comment that ends in the line above a public field, as Markdown."""
    if field.is_alias or field.is_private or not field.lineno or not isinstance(field.filepath, Path):
        return ""
    found: list[str] = []
    for line in reversed(field.filepath.read_text().splitlines()[: field.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        found.insert(0, line.strip().removeprefix("# "))
    # Angle brackets outside of code would be taken for HTML.
    parts = " ".join(found).split("`")
    return "`".join(part.replace("<", "&lt;") if number % 2 == 0 else part for number, part in enumerate(parts))
