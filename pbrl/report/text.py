"""Text from runs, made safe to show. A run folder is data from anywhere: its names may hold anything."""

from __future__ import annotations

import hashlib
import re

LONGEST_LABEL = 100  # characters


def printable(text: str) -> str:
    r"""The text with control characters, line breaks and broken Unicode written out: `\x1b`, `\n`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def spreadsheet_cell(text: str) -> str:
    """The text, with a quotation mark before what a spreadsheet would run as a formula."""
    text = printable(text)
    return f"'{text}" if re.match(r"[=@]|[+-](?![\d.]+(e[+-]?\d+)?$)", text, re.IGNORECASE) else text


def label(text: str) -> str:
    """A name for tables, figures and files: printable, and shortened if it is very long.

    A digest takes the place of what is cut off, so that different names stay different.
    """
    text = printable(text)
    if len(text) <= LONGEST_LABEL:
        return text
    return f"{text[: LONGEST_LABEL - 10]}… {digest(text)}"


def digest(text: str) -> str:
    """Eight characters that differ for different texts."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
