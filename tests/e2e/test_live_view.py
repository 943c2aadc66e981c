"""The dashboard in JupyterLab, over real generation on the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

if TYPE_CHECKING:
    from conftest import Lab, Notebook

TUTORIAL = Path(__file__).parents[2] / "tutorials" / "01_first_tokens.ipynb"

# A number that stands for the pixels of the block map, or 0 while it is not drawn.
MAP_PIXELS = """() => {
  const canvas = document.querySelector('.lms canvas.lms-map');
  if (!canvas || !canvas.width || !canvas.height) return 0;
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let sum = 2166136261;
  for (const value of new Uint32Array(pixels.buffer)) sum = Math.imul(sum ^ value, 16777619);
  return sum >>> 0;
}"""
CHANGED = f"(last) => {{ const now = ({MAP_PIXELS})(); return now === last ? 0 : now; }}"
COUNTS = "() => window.__lmscope_views.at(-1).lmscopeTest"

CELLS = (
    "%load_ext lmscope\n"
    "from lmscope import LLM, SamplingParams, watch\n"
    "llm = LLM('demo', num_kv_blocks=48, max_num_seqs=4, max_num_batched_tokens=64, threads=1)",
    "view = watch(llm)",
    "start = 'You are a patient tutor. Answer in one short sentence. '\n"
    "questions = ['Why is the sky blue?', 'What is rain?', 'Who wrote Dune?', 'What is bread?',\n"
    "             'How many moons has Mars?', 'Why do cats purr?']\n"
    "params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)\n"
    "streams = [llm.submit(start + question, params) for question in questions]",
    "for stream in streams:\n    stream.wait(300)\nprint(len(streams[0].token_ids))",
    "link = view._feed._pages[0].link\nprint(link._sent_seq, link._acked_seq)",
    "llm.close()\nview.close()",
)


def wait_for_change(notebook: Notebook, last: int) -> int:
    """The pixels of the map as soon as they differ from `last` and it is drawn."""
    return notebook.page.wait_for_function(CHANGED, arg=last).json_value()


def look_at_map(notebook: Notebook) -> None:
    """Scroll to the map: what is out of sight is not drawn, and has no map before it is."""
    for selector in (".lms", ".lms canvas.lms-map"):
        notebook.look_at(selector)


def test_the_map_changes_while_the_model_generates_and_the_last_picture_is_stored(
    lab: Lab, demo_model: Path
) -> None:
    notebook = lab.open("live.ipynb", CELLS)
    notebook.run(0)
    notebook.run(1)
    page = notebook.page
    seen = [wait_for_change(notebook, 0)]

    notebook.run(2)
    for _ in range(5):
        seen.append(wait_for_change(notebook, seen[-1]))
    assert len(set(seen)) == 6

    assert notebook.run(3) == "48\n"
    page.wait_for_selector(".lms :text('Finished')")
    # The final picture made the front end draw the view anew; the one before is gone.
    assert page.evaluate("() => window.__lmscope_views.length") == 1
    counts = page.evaluate(COUNTS)
    assert counts["errors"] == []
    assert counts["gaps"] == 0
    sent, acknowledged = map(int, notebook.run(4).split())
    assert acknowledged > 5
    assert sent - acknowledged <= 2
    assert notebook.errors == []

    (stored,) = notebook.outputs(1)
    assert '<img alt="lmscope: demo' in stored["data"]["text/html"]
    assert "finished" in stored["data"]["text/html"]
    assert "Why is the sky blue?" in stored["data"]["text/html"]
    assert stored["data"]["text/plain"].startswith("lmscope  step")
    assert sum(len(str(value).encode()) for value in stored["data"].values()) < 50_000

    notebook.run(5)
    (left,) = notebook.outputs(1)
    assert set(left["data"]) == {"text/html", "text/plain"}
    check_untrusted(lab, stored)


def check_untrusted(lab: Lab, stored: dict[str, Any]) -> None:
    """A notebook that nobody here has signed shows the stored picture and its numbers."""
    page = nbformat.v4.new_markdown_cell("Sent by somebody else.")
    output = nbformat.v4.new_output("display_data", data=stored["data"])
    script = nbformat.v4.new_output(
        "display_data", data={"text/html": "<script>window.stolen = 1</script><p>theirs</p>"}
    )
    cell = nbformat.v4.new_code_cell("watch(llm)", outputs=[output, script])
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    sent = nbformat.v4.new_notebook(cells=[page, cell], metadata=metadata)
    nbformat.write(sent, lab.folder / "untrusted.ipynb")
    notebook = lab.open_again("untrusted.ipynb")
    image = notebook.page.locator('.jp-OutputArea img[src^="data:image/png"]')
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 1600
    assert "blocks used" in image.get_attribute("alt")
    table = notebook.page.locator(".jp-OutputArea table").inner_text()
    assert "finished at step" in table
    assert notebook.page.get_by_text("theirs").count() == 1
    assert notebook.page.evaluate("() => window.stolen") is None


def test_the_first_tutorial_runs_in_the_browser_and_its_live_view_moves(
    lab: Lab, demo_model: Path
) -> None:
    cells = nbformat.read(TUTORIAL, as_version=4).cells
    watching = [
        index
        for index, cell in enumerate(cells)
        if cell.cell_type == "code" and "lmscope.watch(" in cell.source
    ]
    notebook = lab.open_copy(TUTORIAL)
    seen: list[int] = []
    for index, cell in enumerate(cells):
        if cell.cell_type != "code":
            continue
        is_live = index > watching[0] and not seen
        if is_live:
            look_at_map(notebook)
            seen.append(wait_for_change(notebook, 0))
        notebook.start(index)
        if is_live:
            look_at_map(notebook)
        for _ in range(2 if is_live else 0):
            seen.append(wait_for_change(notebook, seen[-1]))
        notebook.wait(index)

    assert len(set(seen)) == 3
    assert notebook.errors == []
    counts = notebook.page.evaluate("() => window.__lmscope_views.map((v) => v.lmscopeTest)")
    assert len(counts) == len(watching)
    assert [count["errors"] for count in counts] == [[]] * len(watching)
    for index in watching:
        stored = [o["data"] for o in notebook.outputs(index) if "text/html" in o.get("data", {})]
        assert ["finished" in data["text/html"] for data in stored] == [True]
