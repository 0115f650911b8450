"""HTML as nested calls. Text is escaped unless it is `Html`, which only `tag` makes."""

from __future__ import annotations

from html import escape

MANY = 9  # columns of a table that no narrow window has room for
VOID = ("meta", "br", "hr", "img", "input", "link")  # these have no closing tag


class Html(str):
    """Text that is markup already."""


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Make an element, such as `tag("td", "a < b", class_="number")`. Attributes drop a final underscore, others become
    hyphens; None and False leave one out, True stands alone."""
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f'{key}="{escape(str(value))}"')
    if name in VOID:
        return Html(f"<{' '.join(words)}>")
    return Html(f"<{' '.join(words)}>{joined(children)}</{name}>")


def joined(children) -> Html:
    """Join children one after the other, texts escaped."""
    return Html("".join(c if isinstance(c, Html) else escape(str(c), quote=False) for c in children))


def rows_of(header: list[str], rows: list[list[object]], left: int = 1, bars: int | None = None) -> Html:
    """Make a table whose words wrap where it would be wider than the window; all but the first `left` columns are
    numbers, and `bars` is the one with bars, which a narrow window leaves out. Headers of many columns stand upright in
    a window that is not wide."""

    def cells(name: str, row) -> Html:
        classes = ("bars" if i == bars else None if i < left else "number" for i in range(len(row)))
        return joined(tag(name, cell, class_=class_) for cell, class_ in zip(row, classes))

    head = tag("thead", tag("tr", cells("th", header)))
    body = tag("tbody", joined(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", head, body), class_="scroll many" if len(header) > MANY else "scroll")


def bar(share: float, class_: str = "bar") -> Html:
    """Draw a horizontal bar as long as the share, 0 to 1, of its cell."""
    return tag("div", tag("i", style=f"width:{100 * min(share, 1.0):.1f}%") if share > 0 else "", class_=class_)
