"""How well a model predicts a short text with its weights in float32 and in fewer bits.

    python kernels/benchmarks/perplexity.py [--model demo] [--json FILE]

Perplexity is e to the mean of -log p(token | all before it) over perplexity.txt, which was
written for this purpose. Also counted: of how many tokens the most likely one is that of float32.
The 8-bit weights are measured twice: in steps of four rows, which compiled loops multiply by
them, and in long steps, which use the same weights in half precision. The blocks of the GGUF file
that the demo model comes in are measured in steps of two rows, which are multiplied by them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Score", "score", "table"]

_TEXT = Path(__file__).with_name("perplexity.txt")
# What to call it, and options of the LLM.
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("float32", {"exact": True}),
    ("default", {}),
    ("gguf, steps of 2 rows", {"quantization": "gguf", "max_num_batched_tokens": 2}),
    ("int8, long steps", {"quantization": "int8"}),
    ("int8, steps of 4 rows", {"quantization": "int8", "max_num_batched_tokens": 4}),
)


class Score(NamedTuple):
    """Of one variant over the text. likeliest: the token it would have chosen at each place."""

    name: str
    linears: str
    num_tokens: int
    perplexity: float
    likeliest: tuple[int, ...]
    cpu_s: float

    def share_like(self, other: Score) -> float:
        pairs = zip(self.likeliest, other.likeliest, strict=True)
        return sum(a == b for a, b in pairs) / len(self.likeliest)


def score(
    name: str,
    linears: str,
    logprobs: Sequence[Any],
    token_ids: Sequence[int],
    cpu_s: float = 0.0,
) -> Score:
    """From the log probabilities of a prompt, the first of which is None.

    logprobs    at each place a mapping of token to what has `logprob` and `rank`
    """
    total, likeliest = 0.0, []
    for token_id, place in zip(token_ids[1:], logprobs[1:], strict=True):
        total -= place[token_id].logprob
        likeliest.append(next(token for token, each in place.items() if each.rank == 1))
    perplexity = math.exp(total / len(likeliest))
    return Score(name, linears, len(likeliest), perplexity, tuple(likeliest), cpu_s)


def table(scores: Sequence[Score]) -> str:
    """Markdown; the first score is what the others are compared with."""
    first = scores[0]
    lines = [
        "| weights | linears | perplexity | to float32 | same likeliest token | CPU s |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.name} | {each.linears} | {each.perplexity:.4f} | "
        f"{each.perplexity / first.perplexity - 1:+.3%} | {each.share_like(first):.2%} | "
        f"{each.cpu_s:.1f} |"
        for each in scores
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    scores = [
        _measure(name, options.model, {"threads": options.threads, **given})
        for name, given in _VARIANTS
    ]
    print(f"{scores[0].num_tokens} tokens of {_TEXT.name}, {options.model}\n")
    print(table(scores))
    if options.json is not None:
        figures = [
            {
                "name": each.name,
                "linears": each.linears,
                "num_tokens": each.num_tokens,
                "perplexity": each.perplexity,
                "share_like_float32": each.share_like(scores[0]),
                "cpu_s": each.cpu_s,
            }
            for each in scores
        ]
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _measure(name: str, model: str, options: dict[str, Any]) -> Score:
    from lmscope import LLM, SamplingParams

    with LLM(model, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        start = time.process_time()
        (output,) = llm.generate([_TEXT.read_text()], params, use_tqdm=False)
        cpu_s = time.process_time() - start
        assert output.prompt_logprobs is not None
        linears = llm.plan.linears.what
        return score(name, linears, output.prompt_logprobs, output.prompt_token_ids, cpu_s)


if __name__ == "__main__":
    main()
