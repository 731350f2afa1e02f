"""What the commands print, made to fit the terminal."""

from __future__ import annotations

import shutil
import textwrap


def columns() -> int:
    """Returns the width of the terminal, or COLUMNS; without both, a large number, because files have lines of any
    length."""
    return shutil.get_terminal_size((1 << 20, 24)).columns


def folded(text: str) -> str:
    """Returns text whose comment lines fit the terminal."""
    width, lines = columns(), []
    for line in text.splitlines():
        is_long = line.startswith("# ") and len(line) > width
        lines += textwrap.wrap(line, width, subsequent_indent="#   ", break_long_words=False) if is_long else [line]
    return "\n".join(lines)
