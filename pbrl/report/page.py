"""The page that holds everything: plain HTML without scripts, which loads nothing from outside."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence

from pbrl.report.tables import Table
from pbrl.report.text import printable

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto;
       padding: 0 1.2rem; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 1px solid #ddd; padding-bottom: .3rem; }
nav a { margin-right: 1rem; display: inline-block; } a { color: #0072B2; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e6e6e6; white-space: nowrap; }
th { border-bottom: 2px solid #999; } .key { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; } /* stays when the table is scrolled */
.wide { overflow-x: auto; }
figure { margin: 1rem 0; } figure div { overflow-x: auto; }
figure img { max-width: max(100%, 40rem); height: auto; } /* scrolls on a telephone: smaller, it could not be read */
figcaption, .small { color: #555; font-size: .9rem; max-width: 60rem; }
.warning { border-left: 4px solid #B03A00; background: #FDF3EC; padding: .5rem .9rem; margin: .6rem 0; }
pre { background: #f5f5f5; padding: .7rem; white-space: pre-wrap; font-size: .85rem; }
.tabs { display: flex; flex-wrap: wrap; } .tabs > input { position: absolute; opacity: 0; }
.tabs > label { order: 1; padding: .3rem .9rem; cursor: pointer; border-bottom: 3px solid transparent; color: #0072B2; }
.tabs > input:checked + label { border-color: #0072B2; color: #222; }
.tabs > input:focus-visible + label { outline: 2px solid #0072B2; }
.tabs > div { order: 2; width: 100%; display: none; } .tabs > input:checked + label + div { display: block; }
@media print { .tabs > div { display: block; } }
"""


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


def page(title: str, introduction: str, sections: Mapping[str, str]) -> str:
    """The whole page, pictures included."""
    identities = {heading: f"section-{i}" for i, heading in enumerate(sections)}
    links = "".join(f'<a href="#{identity}">{_escape(name)}</a>' for name, identity in identities.items())
    body = "".join(
        f'<section id="{identities[name]}"><h2>{_escape(name)}</h2>\n{content}</section>\n'
        for name, content in sections.items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en-GB"><head><meta charset="utf-8"><title>{_escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">\n<style>{STYLE}</style>'
        f"</head><body>\n<h1>{_escape(title)}</h1>\n{introduction}<nav>{links}</nav>\n{body}</body></html>\n"
    )
