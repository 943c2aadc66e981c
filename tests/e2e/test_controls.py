"""Buttons in JupyterLab: they stop and step the real engine, and scrub a recording."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import Lab, Notebook

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
ERRORS = "() => window.__lmscope_views.flatMap((view) => view.lmscopeTest.errors)"

# `seen` has every struct; `commands` says how many there were once a command had closed the gate.
DEBUG = (
    "import lmscope\n"
    "from lmscope import LLM, SamplingParams\n"
    "llm = LLM('demo', num_kv_blocks=48, max_num_seqs=4, max_num_batched_tokens=64, threads=1)\n"
    "seen, commands = [], []\n"
    "listening = llm.tap.follow(seen.append)\n"
    "def counted(ask):\n"
    "    def command(*arguments):\n"
    "        ask(*arguments)\n"
    "        commands.append(len(seen))\n"
    "    return command\n"
    "llm.gate.ask_to_pause = counted(llm.gate.ask_to_pause)\n"
    "def wait(condition):\n"
    "    bell = llm.gate._bell\n"
    "    while True:\n"
    "        with bell.lock:\n"
    "            if condition():\n"
    "                return\n"
    "            ring = bell.listen()\n"
    "        assert bell.wait(ring, 60)",
    "dbg = lmscope.debug(llm)",
    "stream = llm.submit('Once upon a time', SamplingParams(max_tokens=220, ignore_eos=True))\n"
    "dbg.resume()",
    "wait(lambda: llm.gate.at is not None)\n"
    "stood = len(seen)\n"
    "print(stood - commands[-1], type(llm.gate.at).__name__, stream.finished)",
    "wait(lambda: len(seen) > stood and llm.gate.at is not None)\n"
    "print(len(seen) - stood, seen[-1] is llm.gate.at, type(llm.gate.at).__name__)",
    "print(llm.gate.breakpoints)",
    "print(len(stream.wait(300).token_ids))",
    "dbg.close()\nllm.close()",
)

REPLAY = (
    "import lmscope\n"
    "from lmscope import LLM, SamplingParams\n"
    "llm = LLM('scripted', execute='scripted', script=lambda i, p: 97 + p % 26, block_size=4,\n"
    "          num_kv_blocks=24, max_num_batched_tokens=16)\n"
    "with llm, lmscope.record(llm) as recording:\n"
    "    prompts = [f'A shared beginning {n}' for n in range(4)]\n"
    "    outputs = llm.generate(prompts, SamplingParams(max_tokens=20), use_tqdm=False)\n"
    "player = lmscope.replay(recording)",
    "player",
    "player.follow(lambda item: None)[1].close()\n"
    "print(player.step, recording.steps[-1], player.is_playing)",
)


def wait_for_change(notebook: Notebook, last: int) -> int:
    """The pixels of the map as soon as they differ from `last` and it is drawn."""
    return notebook.page.wait_for_function(CHANGED, arg=last).json_value()


def shows_step(notebook: Notebook, step: int) -> None:
    """Wait until the picture is that of a step."""
    notebook.page.wait_for_function(
        "(words) => document.querySelector('.lms .lms-where b')?.textContent.startsWith(words)",
        arg=f"Step {step:,}",
    )


def click(notebook: Notebook, selector: str) -> None:
    notebook.page.locator(selector).first.click()


def test_pause_stops_the_engine_step_moves_it_by_one_and_resume_lets_it_run(
    lab: Lab, demo_model: Path
) -> None:
    notebook = lab.open("debug.ipynb", DEBUG)
    page: Any = notebook.page
    for index in range(3):
        notebook.run(index)
    page.wait_for_selector(".lms .lms-pill[data-phase='live']")
    drawn = wait_for_change(notebook, wait_for_change(notebook, 0))

    click(notebook, ".lms .lms-d-pause")
    more, at, finished = notebook.run(3).split()
    assert int(more) <= 1
    assert finished == "False"
    page.wait_for_selector(".lms .lms-pill[data-phase='paused']")
    page.wait_for_selector(f".lms .lms-station[data-state='here']:has-text('{at}')")

    for _ in range(2):
        click(notebook, ".lms .lms-d-step")
        moved, is_under_cursor, at = notebook.run(4).split()
        assert (moved, is_under_cursor) == ("1", "True")
        page.wait_for_selector(f".lms .lms-station[data-state='here']:has-text('{at}')")
        # The next cell counts from here.
        notebook.run(3)

    page.locator(".lms .lms-breakbar select").select_option("finish")
    page.wait_for_selector(".lms .lms-break")
    assert "finish" in notebook.run(5)
    click(notebook, ".lms .lms-d-pause")
    page.wait_for_selector(".lms .lms-pill[data-phase='live']")
    assert wait_for_change(notebook, drawn)
    # It stops once more, at the end.
    page.wait_for_selector(".lms .lms-pill[data-phase='paused']")
    click(notebook, ".lms .lms-break")
    click(notebook, ".lms .lms-d-pause")
    assert notebook.run(6) == "220\n"

    assert page.locator(".lms .lms-note:visible").all_inner_texts() == []
    assert page.evaluate(ERRORS) == []
    assert notebook.errors == []
    notebook.run(7)


def test_scrubbing_a_recording_draws_it_anew(lab: Lab) -> None:
    notebook = lab.open("replay.ipynb", REPLAY)
    page: Any = notebook.page
    notebook.run(0)
    notebook.run(1)
    seen = [wait_for_change(notebook, 0)]
    shows_step(notebook, 0)

    # Dragging along the timeline.
    box = page.locator(".lms .lms-p-time canvas").first.bounding_box()
    middle = box["y"] + 40
    page.mouse.move(box["x"] + box["width"] * 0.8, middle)
    page.mouse.down()
    seen.append(wait_for_change(notebook, seen[-1]))
    page.mouse.move(box["x"] + box["width"] * 0.4, middle, steps=5)
    page.mouse.up()
    seen.append(wait_for_change(notebook, seen[-1]))

    # Keys: the end, a step back, the beginning.
    last = int(notebook.run(2).split()[1])
    page.locator(".lms").first.focus()
    page.keyboard.press("End")
    shows_step(notebook, last)
    seen.append(wait_for_change(notebook, seen[-1]))
    page.locator(".lms").first.focus()
    page.keyboard.press("ArrowLeft")
    shows_step(notebook, last - 1)
    page.keyboard.press("Home")
    shows_step(notebook, 0)
    assert notebook.run(2) == f"0 {last} False\n"

    # Play runs to the end by itself.
    page.locator(".lms").first.focus()
    page.keyboard.press("Space")
    shows_step(notebook, last)
    assert len(set(seen)) >= 3
    assert page.locator(".lms .lms-note:visible").all_inner_texts() == []
    assert page.evaluate(ERRORS) == []
    assert notebook.errors == []
