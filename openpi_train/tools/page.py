"""HTML for the report: escaped text, tables, figures and videos as data URIs, and the page that holds them.

The page needs no other file, no network and no script. Read next: `report.py`.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

# The browser may load nothing from outside the page.
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
_MEDIA = {".mp4": "video/mp4", ".gif": "image/gif", ".png": "image/png", ".svg": "image/svg+xml"}
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Liberation Sans", "DejaVu Sans", sans-serif; color: #1c2024; margin: 0 auto;
  max-width: 74rem; padding: 1.5rem 2rem 4rem; background: #fff; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; padding-bottom: .25rem;
  border-bottom: 1px solid #d9dde1; } h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
nav { margin: .8rem 0 0; } nav a { margin-right: 1rem; } a { color: #1f5fa8; text-decoration: none; }
p.note { color: #5b6470; margin: .3rem 0; max-width: 60rem; }
p.missing { color: #8a5a00; background: #fff7e0; padding: .4rem .7rem; border-radius: 4px; }
table { border-collapse: collapse; margin: .4rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .9rem .22rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #eceff1; }
th { font-weight: 600; color: #3d4650; } td.number, th.number { text-align: right; padding-left: .4rem; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 1.6rem; align-items: flex-start; }
figure { margin: 0; max-width: 100%; } figcaption { font-size: .85rem; color: #3d4650; margin-bottom: .2rem; }
figure img, figure video { max-width: 100%; display: block; } figure img.pixels { image-rendering: pixelated; }
pre { background: #f5f6f8; padding: .7rem .9rem; border-radius: 4px; overflow-x: auto; white-space: pre-wrap;
  word-break: break-word; font-size: .85rem; } details > summary { cursor: pointer; color: #1f5fa8; }
"""


def text(value: object) -> str:
    """Escaped text; numbers with four digits, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return html.escape(f"{value:.4g}")
    return html.escape(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; columns whose first value is a number are right-aligned."""
    is_number = [bool(rows) and isinstance(value, int | float) for value in (rows[0] if rows else head)]
    kinds = [' class="number"' if one else "" for one in is_number]
    lines = ["<tr>" + "".join(f"<th{kind}>{text(one)}</th>" for one, kind in zip(head, kinds, strict=True)) + "</tr>"]
    for row in rows:
        cells = "".join(f"<td{kind}>{text(one)}</td>" for one, kind in zip(row, kinds, strict=True))
        lines.append(f"<tr>{cells}</tr>")
    return "<table>" + "\n".join(lines) + "</table>"


def note(sentence: str) -> str:
    """A remark."""
    return f'<p class="note">{text(sentence)}</p>'


def missing(what: str) -> str:
    """A note on a missing part, and why it is missing."""
    return f'<p class="missing">{text(what)}</p>'


def figure(picture: str | bytes, caption: str, kind: str = ".svg") -> str:
    """A picture (SVG as text, else bytes) with its caption."""
    content = picture.encode() if isinstance(picture, str) else picture
    pixels = ' class="pixels"' if kind == ".png" else ""
    image = f'<img{pixels} alt="{text(caption)}" src="{_uri(content, kind)}">'
    return f"<figure><figcaption>{text(caption)}</figcaption>{image}</figure>"


def media(path: Path, caption: str) -> str:
    """A video or picture from a file."""
    if path.suffix != ".mp4":
        return figure(path.read_bytes(), caption, path.suffix)
    source = _uri(path.read_bytes(), path.suffix)
    video = f'<video controls loop muted playsinline preload="auto" width="384" src="{source}"></video>'
    return f"<figure><figcaption>{text(caption)}</figcaption>{video}</figure>"


def figures(parts: Sequence[str]) -> str:
    """Figures beside each other, as many as fit."""
    return f'<div class="figures">{"".join(parts)}</div>'


def folded(title: str, content: str) -> str:
    """Content that is shown when its title is clicked."""
    return f"<details><summary>{text(title)}</summary>{content}</details>"


def page(title: str, sections: Mapping[str, str], subtitle: str) -> str:
    """The whole file."""
    names = {name: f"part-{number}" for number, name in enumerate(sections)}
    links = "".join(f'<a href="#{mark}">{text(name)}</a>' for name, mark in names.items())
    parts = "\n".join(
        f'<section><h2 id="{names[name]}">{text(name)}</h2>\n{body}</section>' for name, body in sections.items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><style>{_STYLE}</style>'
        f"</head>\n<body><h1>{text(title)}</h1>{note(subtitle)}<nav>{links}</nav>\n{parts}\n</body></html>\n"
    )


def _uri(content: bytes, kind: str) -> str:
    return f"data:{_MEDIA[kind]};base64,{base64.b64encode(content).decode()}"
