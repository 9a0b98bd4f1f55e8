"""The blocks of a report, and the HTML file that jinja2 makes of them with the files of `report_page/`.

The page needs no other file and no network: styles, the curves' library (uPlot), pictures and videos are inside it. All
text is escaped by jinja2. Read next: `report.py`, `report_page/page.html.jinja`.
"""

import base64
import dataclasses
import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import jinja2
import numpy as np
from markupsafe import Markup, escape
from PIL import Image

_FOLDER = Path(__file__).with_name("report_page")
_MEDIA = {".mp4": "video/mp4", ".gif": "image/gif", ".png": "image/png", ".svg": "image/svg+xml"}
_DIGITS = 6  # of a curve's values


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading below that of the section."""

    kind: ClassVar[str] = "heading"
    text: str


@dataclasses.dataclass(frozen=True)
class Note:
    """A sentence; `missing` says why a part is not there."""

    kind: ClassVar[str] = "note"
    text: str
    style: Literal["", "missing"] = ""


@dataclasses.dataclass(frozen=True)
class Bar:
    """A cell: a number, and a bar of its share of the largest."""

    number: float
    share: float


@dataclasses.dataclass(frozen=True)
class DataTable:
    """A table. Cells are numbers, texts, `Bar`s or None; columns whose first value is a number are right-aligned."""

    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[object]]

    @property
    def is_number(self) -> list[bool]:
        """Of each column, whether it is right-aligned."""
        columns = zip(*self.rows, strict=True)
        return [isinstance(next((v for v in values if v is not None), ""), int | float) for values in columns]


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve; `band` has the lower and upper ends of an interval, `colour` and `dash` are numbers of a style."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dash: int = 0
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """Curves over steps, drawn in the browser; `limits` are of the values."""

    kind: ClassVar[str] = "chart"
    title: str
    unit: str
    lines: Sequence[Line]
    x_label: str = "step"
    is_logarithmic: bool = False
    limits: tuple[float, float] | None = None

    def data(self) -> dict[str, object]:
        """What the browser draws, as JSON."""
        lines = [
            {
                "label": line.label,
                "x": _numbers(line.x),
                "y": _numbers(line.y),
                "band": None if line.band is None else [_numbers(end) for end in line.band],
                "colour": line.colour,
                "dash": line.dash,
            }
            for line in self.lines
        ]
        about = {"title": self.title, "unit": self.unit, "xLabel": self.x_label, "log": self.is_logarithmic}
        return {**about, "limits": self.limits, "lines": lines}


@dataclasses.dataclass(frozen=True)
class Media:
    """A picture or a video, whose content is in `source` as a data URI."""

    kind: ClassVar[str] = "media"
    source: str
    caption: str
    style: Literal["video", "picture", "pixels"]

    @classmethod
    def of_file(cls, path: Path, caption: str) -> "Media":
        """From a file; its name ends with its type."""
        return cls(_uri(path.read_bytes(), path.suffix), caption, "video" if path.suffix == ".mp4" else "picture")

    @classmethod
    def of_pixels(cls, picture: np.ndarray, caption: str) -> "Media":
        """From pixels, uint8 [height, width, 3]."""
        file = io.BytesIO()
        Image.fromarray(picture).save(file, format="PNG")
        return cls(_uri(file.getvalue(), ".png"), caption, "pixels")


@dataclasses.dataclass(frozen=True)
class Preformatted:
    """A text with its line breaks, and what it is."""

    kind: ClassVar[str] = "preformatted"
    text: str
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Folded:
    """Blocks that are shown when the title is clicked."""

    kind: ClassVar[str] = "folded"
    title: str
    blocks: Sequence["Block"]


@dataclasses.dataclass(frozen=True)
class Beside:
    """Blocks beside each other, as many as fit."""

    kind: ClassVar[str] = "beside"
    blocks: Sequence["Block"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A sentence on what became of a run."""

    kind: ClassVar[str] = "verdict"
    text: str
    is_good: bool | None = None

    @property
    def style(self) -> str:
        """Its class in the style sheet."""
        return {True: "good", False: "bad", None: "neutral"}[self.is_good]


Block = Heading | Note | DataTable | Chart | Media | Preformatted | Folded | Beside | Verdict


def cell(value: object) -> str:
    """The text of a table's cell: numbers with four digits, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def with_code(text: str) -> Markup:
    """The escaped text, in which what stands between backticks is shown as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))


def page(title: str, sections: Mapping[str, Sequence[Block]], written: str) -> str:
    """The whole file; `written` says when and by what."""
    script = "\n".join(_file(name) for name in ("uPlot.iife.min.js", "report.js"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(cell=cell, with_code=with_code)
    return environment.get_template("page.html.jinja").render(
        title=title,
        sections=sections,
        written=written,
        policy=policy(script),
        style=Markup(_file("uPlot.min.css") + _file("report.css")),
        script=Markup(script),
        licence=Markup(_file("uPlot.LICENSE")),
    )


def policy(script: str) -> str:
    """What the browser may do: run this script, and load nothing from outside the page."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = "img-src data:; media-src data:; style-src 'unsafe-inline'"
    return f"default-src 'none'; {allowed}; script-src 'sha256-{digest}'"


def _file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values]


def _uri(content: bytes, suffix: str) -> str:
    return f"data:{_MEDIA[suffix]};base64,{base64.b64encode(content).decode()}"
