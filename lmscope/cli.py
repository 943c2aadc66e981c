"""The lmscope command: `lmscope demo | generate | export | models`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lmscope import LLM, SamplingParams, open_recording, record
from lmscope.boundary import SchedulerOutput
from lmscope.decisions import Code, Outcome
from lmscope.errors import LmscopeError
from lmscope.scope.recording import Recording
from lmscope.scope.why import sentence

__all__ = ["main"]

_SYSTEM = (
    "You are a patient tutor. Answer in two or three short sentences, in plain words, "
    "and give one everyday example."
)
_QUESTIONS = (
    "Why is the sky blue at noon and red at sunset?",
    "Why does bread rise in the oven?",
    "How do noise-cancelling headphones work?",
    "Why do we see lightning before we hear thunder?",
    "What makes a rainbow appear?",
    "Why does ice float on water?",
    "How does a refrigerator keep food cold?",
    "Why is the sky blue at noon and red at sunset?",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status. Errors of the user are one line."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (LmscopeError, ValueError, OSError) as error:
        print(f"lmscope: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lmscope: interrupted", file=sys.stderr)
        return 130
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmscope", description="The inference-engine microscope, from the command line."
    )
    commands = parser.add_subparsers(required=True, metavar="demo | generate | export | models")

    demo = commands.add_parser("demo", help="run the demo model and write a page of the run")
    demo.add_argument("--out", type=Path, default=Path(), help="folder to write to")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="continue a prompt")
    generate.add_argument("prompt", nargs="+", help="one or more prompts")
    generate.add_argument("-m", "--model", default="demo", help="hub id, folder or .gguf file")
    generate.add_argument("-n", "--max-tokens", type=int, default=64)
    generate.add_argument("-t", "--temperature", type=float, default=0.0)
    generate.add_argument("--seed", type=int, default=None)
    generate.add_argument("--chat", action="store_true", help="use the model's chat template")
    generate.add_argument("--record", type=Path, help="also write a recording")
    generate.set_defaults(run=_generate)

    export = commands.add_parser("export", help="turn a recording into an HTML page")
    export.add_argument("recording", type=Path)
    export.add_argument("page", type=Path)
    export.set_defaults(run=_export)

    models = commands.add_parser("models", help="which models this machine has")
    models.set_defaults(run=_models)
    return parser


def _demo(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    # A small pool and a small budget, so that eight requests get into each other's way.
    llm = LLM("demo", block_size=16, num_kv_blocks=32, max_num_batched_tokens=128)
    print(llm)
    print(f"loaded in {time.perf_counter() - start:.1f} s\n")

    with llm, record(llm) as recording:
        conversations = [
            [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
            for question in _QUESTIONS
        ]
        start = time.perf_counter()
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=60))
        seconds = time.perf_counter() - start

    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    for question, output in zip(_QUESTIONS, outputs, strict=True):
        print(f"[{output.request_id}] {question}\n    {output.outputs[0].text.strip()}\n")
    print(
        f"{num_tokens} tokens in {seconds:.1f} s ({num_tokens / seconds:.0f} tokens/s), "
        f"{recording.steps[-1]} steps\n"
    )
    _print_story(recording)
    page, file = options.out / "lmscope-demo.html", options.out / "lmscope-demo.lmscope"
    recording.save(file)
    recording.to_html(page)
    print(f"wrote {page} (open it in a browser: one file, no network) and {file}")
    print("next: `make lab` opens the notebooks in JupyterLab")


def _print_story(recording: Recording) -> None:
    """Which prompts found their prefix in the cache, and who had to make room for whom."""
    print("Prefix hits (tokens of the prompt that came from the cache):")
    requests = recording.frames.requests
    for row in requests.itertuples():
        print(f"  {row.request_id}: {row.cached_tokens} of {row.prompt_tokens}")
    print("Preemptions:")
    count = 0
    for boundary in recording.boundaries:
        if not isinstance(boundary, SchedulerOutput):
            continue
        for decision in boundary.decisions:
            if decision.outcome is Outcome.PREEMPTED:
                count += 1
                print(f"  step {boundary.step}, {decision.request_id}: {sentence(decision)}")
            elif decision.code is Code.RESUMED and decision.tokens_cached:
                print(f"  step {boundary.step}, {decision.request_id}: {sentence(decision)}")
    if not count:
        print("  none")
    print()


def _generate(options: argparse.Namespace) -> None:
    params = SamplingParams(
        temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed
    )
    with LLM(options.model) as llm:
        run = llm.chat if options.chat else llm.generate
        prompts = (
            [[{"role": "user", "content": text}] for text in options.prompt]
            if options.chat
            else options.prompt
        )
        if options.record:
            with record(llm, options.record):
                outputs = run(prompts, params)
        else:
            outputs = run(prompts, params)
    for output in outputs:
        print(output.outputs[0].text)


def _export(options: argparse.Namespace) -> None:
    open_recording(options.recording).to_html(options.page)
    print(f"wrote {options.page}")


def _models(options: argparse.Namespace) -> None:
    from lmscope.config import cache_folder

    folder = cache_folder()
    print(f"demo    SmolLM2-135M-Instruct, kept in {folder}")
    print("others  any hub id, folder with safetensors, or .gguf file that transformers loads")


if __name__ == "__main__":
    sys.exit(main())
