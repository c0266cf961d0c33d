"""The files of a report: tables as CSV and LaTeX, figures as PNG and SVG. Tables also go to the terminal."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from pbrl.report import page
from pbrl.report.figures import render
from pbrl.report.tables import Table
from pbrl.report.text import digest, printable, spreadsheet_cell
from pbrl.run.files import write_atomically

LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "≈": r"$\approx$",
}
LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


class Output:
    """Writes figures and tables into the report's folder, prints tables, and returns their HTML."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self.tables: dict[str, list[Table]] = {}
        for kind in ("figures", "tables"):
            (folder / kind).mkdir(parents=True, exist_ok=True)

    def table(self, table: Table, teacher: str = "", *, show: bool = False) -> str:
        """Write a LaTeX file. The numbers go into one CSV file with other tables of this name: `write_csv`."""
        self.tables.setdefault(table.name, []).append(table)
        if not table.rows:
            return ""
        write_atomically(self.folder / "tables" / f"{file_name(table.name, teacher)}.tex", to_latex(table))
        if show:
            self.say(table.title, "italic")
            for part in to_terminal(table, self.console):
                self.console.print(part)
        return page.table_html(table)

    def say(self, note: str, style: str = "yellow") -> None:
        """Print text as it is."""
        text = "\n".join(printable(line) for line in note.split("\n"))
        self.console.print(text, style=style, markup=False, highlight=False)

    def figure(self, name: str, figure: Figure, caption: str) -> str:
        """Write a PNG and an SVG file."""
        drawing = render(figure, name)
        write_atomically(self.folder / "figures" / f"{name}.png", drawing.png)
        write_atomically(self.folder / "figures" / f"{name}.svg", drawing.svg)
        return page.figure(name, drawing.png, caption)

    def write_csv(self) -> None:
        """Write one file for each kind of table."""
        for name, kind in self.tables.items():
            if any(table.records for table in kind):
                write_atomically(self.folder / "tables" / f"{name}.csv", to_csv(kind))


def file_name(*parts: str) -> str:
    """A file name that every file system accepts; different parts give different names."""
    return "_".join(_file_name(part) for part in parts if part)


def _file_name(part: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9.=-]+", "_", part).strip("_")
    if len(plain) <= 80 and re.fullmatch(r"[\w.=,:{} -]+", part, re.ASCII):
        return plain
    return f"{plain[:70]}_{digest(part)}".lstrip("_")


def to_terminal(table: Table, console: Console) -> list[rich_table.Table]:
    """The table for rich to print; if it is too wide, several below each other, each with the keys of its rows."""
    unlimited = console.options.update(max_width=10_000)
    keys, rest, parts = list(range(table.keys)), list(range(table.keys, len(table.columns))), []
    while rest:
        count = len(rest)
        while (
            count > 1 and console.measure(_part(table, keys + rest[:count]), options=unlimited).maximum > console.width
        ):
            count -= 1
        parts.append(_part(table, keys + rest[:count]))
        rest = rest[count:]
    return parts


def _part(table: Table, numbers: Sequence[int]) -> rich_table.Table:
    shown = rich_table.Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for number in numbers:
        shown.add_column(Text(printable(table.columns[number])), justify="right" if number >= table.keys else "left")
    for i, row in enumerate(table.rows):  # as Text, brackets are not markup
        shown.add_row(*(Text(printable(row[n]), "bold" if (i, n) in table.best else "") for n in numbers))
    return shown


def to_csv(tables: Sequence[Table]) -> str:
    """The numbers behind tables of one kind; a cell is empty where there is no number."""
    records = [record for table in tables for record in table.records]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({key: _cell(value) for key, value in record.items()})
    return file.getvalue()


def _cell(value: object) -> object:
    """A value for a CSV file."""
    if isinstance(value, str):
        return spreadsheet_cell(value)
    return "" if isinstance(value, float) and math.isnan(value) else value


def to_latex(table: Table) -> str:
    """A tabular that needs no package."""

    def line(cells: Sequence[str], row: int = -1) -> str:
        escaped = ["".join(LATEX.get(c, c) for c in printable(cell)) for cell in cells]
        bold = [rf"\textbf{{{cell}}}" if (row, i) in table.best else cell for i, cell in enumerate(escaped)]
        return " & ".join(bold) + r" \\"

    columns = "l" * table.keys + "r" * (len(table.columns) - table.keys)
    body = "\n".join(line(cells, row) for row, cells in enumerate(table.rows))
    return (
        f"\\begin{{tabular}}{{{columns}}}\n\\hline\n{line(table.columns)}\n\\hline\n{body}\n\\hline\n\\end{{tabular}}\n"
    )
