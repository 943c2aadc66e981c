"""A plain table: what a notebook shows of an answer, and what stays readable without style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmscope.scope.visible import escape

__all__ = ["plain_table"]


def plain_table(
    sentences: Iterable[str], columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> str:
    """Sentences as paragraphs, and rows under their columns; whatever is in them is text.

    A cell that is None is an en dash.
    """
    told = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"{told}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: object) -> str:
    return "–" if cell is None else escape(str(cell))
