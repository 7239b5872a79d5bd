"""HTML as text, with every value escaped: names and texts come out of files from anywhere.

`tag` escapes its attributes and takes finished markup inside; `text` makes finished markup of a
plain text.
"""

from __future__ import annotations

import html
from collections.abc import Sequence


def text(value: object) -> str:
    """Markup that shows `value`; characters that steer a terminal or turn the line are spelled."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in str(value))
    return html.escape(shown, quote=True)


def tag(name: str, *children: str, **attributes: object) -> str:
    """An element; attributes that are Python words end in "_", and "_" inside means "-"."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{''.join(children)}</{name}>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], class_: str = "") -> str:
    """Cells are finished markup; on a narrow screen the table scrolls, not the page."""
    top = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = "".join(
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
        for row in rows
    )
    inner = tag("table", tag("thead", top), tag("tbody", body), class_=class_ or None)
    return tag("div", inner, class_="scroll")


def figure(picture: str, caption: str) -> str:
    """A chart with what it shows, in words."""
    return tag("figure", tag("div", picture, class_="scroll"), tag("figcaption", text(caption)))


def legend(items: Sequence[tuple[str, str]]) -> str:
    """(class of the colour, what it stands for)."""
    keys = (tag("span", tag("i", class_=f"key {style}"), text(name)) for style, name in items)
    return tag("div", *keys, class_="legend")
