"""Write the tutorials as HTML, with what their cells print and draw: `make docs`.

Each is run from its first cell in a kernel of its own, and becomes one file that needs no
network: plotly's figures with plotly's own script, the views as their still pictures.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from plotly import io as plotly_io

__all__ = ["build", "to_html"]

HERE = Path(__file__).parent
TUTORIALS = HERE.parent / "tutorials"
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
# A cell takes a fraction of it; it ends a run that hangs.
CELL_DEADLINE_S = 600


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write tutorials as HTML with their outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="all tutorials unless named")
    parser.add_argument("--out", type=Path, default=HERE / "_build", help="folder to write to")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.notebooks or sorted(TUTORIALS.glob("*.ipynb")):
        made = options.out / f"{path.stem}.html"
        made.write_text(build(path), encoding="utf-8")
        sys.stdout.write(f"wrote {made} ({made.stat().st_size / 1e6:.1f} MB)\n")


def build(path: Path) -> str:
    """The page of a notebook whose cells have just run, in an empty folder.

    An error in a cell raises nbclient's CellExecutionError.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=CELL_DEADLINE_S,
            # Stored state would take the place of the still pictures and show nothing.
            store_widget_state=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    return to_html(notebook)


def to_html(notebook: NotebookNode) -> str:
    """One page of a notebook that has run; it fetches nothing and needs no kernel."""
    has_plotly = False
    for output in (o for cell in notebook.cells for o in cell.get("outputs", ())):
        data = output.get("data", {})
        if WIDGET in data:
            del data[WIDGET]
        if PLOTLY in data:
            # The exporter's own way to show it would ask for the script at a CDN.
            data["text/html"] = plotly_io.to_html(
                data.pop(PLOTLY),
                include_plotlyjs=not has_plotly,
                full_html=False,
                validate=False,
                config={"displaylogo": False},
            )
            has_plotly = True
    notebook.metadata.pop("widgets", None)
    exporter = HTMLExporter(
        # Both would be fetched: formulas are not used, and no widget is left.
        mathjax_url="",
        require_js_url="",
        jquery_url="",
        mermaid_js_url="",
    )
    page, _ = exporter.from_notebook_node(notebook)
    # What the template makes of an address that is empty.
    return re.sub(r'<script src="">\s*</script>', "", str(page))


if __name__ == "__main__":
    main()
