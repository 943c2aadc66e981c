"""The dashboard in JupyterLab, over real generation on the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Lab

# A number that stands for the pixels of the block map, or 0 while it is not drawn.
MAP_PIXELS = """() => {
  const canvas = document.querySelector('.lms canvas.lms-map');
  if (!canvas || !canvas.width || !canvas.height) return 0;
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let sum = 2166136261;
  for (const value of new Uint32Array(pixels.buffer)) sum = Math.imul(sum ^ value, 16777619);
  return sum >>> 0;
}"""
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


def test_the_map_changes_while_the_model_generates_and_the_last_picture_is_stored(
    lab: Lab, demo_model: Path
) -> None:
    notebook = lab.open("live.ipynb", CELLS)
    notebook.run(0)
    notebook.run(1)
    page = notebook.page
    page.wait_for_function(f"() => ({MAP_PIXELS})() !== 0")
    seen = [page.evaluate(MAP_PIXELS)]

    notebook.run(2)
    for _ in range(5):
        page.wait_for_function(f"(last) => ({MAP_PIXELS})() !== last", arg=seen[-1])
        seen.append(page.evaluate(MAP_PIXELS))
    assert len(set(seen)) == 6

    assert notebook.run(3) == "48\n"
    page.wait_for_selector(".lms :text('Finished')")
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
