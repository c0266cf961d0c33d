"""The page that holds everything: one file, which loads nothing from outside. Its only script draws the curves."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from pbrl.report.tables import Table
from pbrl.report.text import printable

STYLE = (Path(__file__).parent / "page.css").read_text()


def _escape(text: str) -> str:
    return html.escape(printable(text))


def table_html(table: Table) -> str:
    """A table with its title."""

    def line(kind: str, cells: Sequence[str], row: int = -1) -> str:
        left, tags = ' class="key"', []
        for i, cell in enumerate(cells):
            text = f"<strong>{_escape(cell)}</strong>" if (row, i) in table.best else _escape(cell)
            tags.append(f"<{kind}{left if i < table.keys else ''}>{text}</{kind}>")
        return f"<tr>{''.join(tags)}</tr>\n"

    body = line("th", table.columns) + "".join(line("td", cells, row) for row, cells in enumerate(table.rows))
    return f'<h3>{_escape(table.title)}</h3>\n<div class="wide"><table>{body}</table></div>\n'


def paragraph(text: str, kind: str = "") -> str:
    """Plain text; `kind` is warning or small."""
    return f'<p class="{kind}">{_escape(text)}</p>\n'


def listing(lines: Sequence[str]) -> str:
    """Lines to copy, such as commands."""
    return f"<pre>{chr(10).join(map(_escape, lines))}</pre>\n"


def figure(name: str, png: bytes, caption: str) -> str:
    """A picture inside the page, with its caption and the names of its files."""
    source = base64.b64encode(png).decode()
    words = f"{caption} Files: figures/{name}.png, .svg."
    return (
        f'<figure><div><img alt="{_escape(name)}" src="data:image/png;base64,{source}"></div>'
        f"<figcaption>{_escape(words)}</figcaption></figure>\n"
    )


def with_chart(figure: str, chart: str) -> str:
    """The figure with curves that can be pointed at in place of its picture."""
    begin, end = figure.index("<div>"), figure.index("</div>") + len("</div>")
    return figure[:begin] + chart + figure[end:]


def films(shown: Sequence[tuple[Path, str]]) -> str:
    """Videos inside the page, each with its caption."""
    parts = []
    for path, words in shown:
        source = base64.b64encode(path.read_bytes()).decode()
        if path.suffix == ".gif":
            film = f'<img alt="{_escape(words)}" src="data:image/gif;base64,{source}">'
        else:
            film = f'<video controls muted loop playsinline src="data:video/mp4;base64,{source}"></video>'
        parts.append(f"<figure>{film}<figcaption>{_escape(words)}</figcaption></figure>\n")
    return f'<div class="films">{"".join(parts)}</div>\n'


def tabs(group: str, contents: Mapping[str, str]) -> str:
    """Tabs that show one content at a time, without a script."""
    parts = []
    for i, (label, content) in enumerate(contents.items()):
        identity = _escape(f"{group}-{i}")
        checked = " checked" if i == 0 else ""
        parts.append(
            f'<input type="radio" name="{_escape(group)}" id="{identity}"{checked}>'
            f'<label for="{identity}">{_escape(label)}</label><div>{content}</div>\n'
        )
    return f'<div class="tabs">{"".join(parts)}</div>\n'


def page(title: str, introduction: str, sections: Mapping[str, str], script: str = "", digest: str = "") -> str:
    """The whole page, pictures included. No script runs in it but the one given, whose SHA-256 is the digest."""
    scripts = f" 'sha256-{digest}'" if script else " 'none'"
    policy = f"default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src{scripts}"
    identities = {heading: f"section-{i}" for i, heading in enumerate(sections)}
    links = "".join(f'<a href="#{identity}">{_escape(name)}</a>' for name, identity in identities.items())
    body = "".join(
        f'<section id="{identities[name]}"><h2>{_escape(name)}</h2>\n{content}</section>\n'
        for name, content in sections.items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en-GB"><head><meta charset="utf-8"><title>{_escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">\n<style>{STYLE}</style>'
        f"</head><body>\n<h1>{_escape(title)}</h1>\n{introduction}<nav>{links}</nav>\n{body}"
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )
