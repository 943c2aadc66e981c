"""Every causal language model of transformers, in small: is it right, refused, or wrong?

    python tests/lmscope/models/survey_architectures.py > survey.txt
    python tests/lmscope/models/survey_architectures.py mistral gemma2

Not a test, since it imports some two hundred model files and takes minutes. Run it with a new
version of transformers: a line with "WRONG" is a model that the check before a load lets pass
and that then computes other numbers. "not made" is a model that these settings do not fit.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmscope import LLM, SamplingParams

SETTINGS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LEFT_OUT = ((), ("sliding_window",), ("head_dim",), ("head_dim", "num_key_value_heads"))
PROMPT = [5, 9, 33, 41, 7, 15, 8, 50, 60, 21, 7, 40, 3, 19]
MOST_PARAMETERS = 60_000_000


def main(model_types: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        sys.stdout.write(f"{model_type:28} {survey(model_type)}\n")
        sys.stdout.flush()


def survey(model_type: str) -> str:
    """The best that comes of any of the settings."""
    results = []
    for names in LEFT_OUT:
        module = make(model_type, {k: v for k, v in SETTINGS.items() if k not in names})
        results.append(module if isinstance(module, str) else compare(module))
        if results[-1].startswith(("right", "WRONG")):
            return results[-1]
    refusals = [result for result in results if not result.startswith("not made")]
    return refusals[0] if refusals else results[0]


def make(model_type: str, settings: dict[str, Any]) -> torch.nn.Module | str:
    auto = transformers.AutoModelForCausalLM
    try:
        config = CONFIG_MAPPING[model_type](**settings)
        with torch.device("meta"):
            shapes = auto.from_config(config, attn_implementation="eager")
        num_parameters = sum(parameter.numel() for parameter in shapes.parameters())
        if num_parameters > MOST_PARAMETERS:
            return f"not made: {num_parameters / 1e6:.0f} million parameters"
        torch.manual_seed(0)
        return auto.from_config(config, attn_implementation="eager").eval()
    except Exception as error:  # whatever a model class finds wrong with settings not its own
        return f"not made: {type(error).__name__} {str(error).strip()[:80]!r}"


def compare(module: Any) -> str:
    """Log probabilities of a prompt in two chunks against those of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with torch.inference_mode():
                expected = module(torch.tensor([PROMPT])).logits[0].log_softmax(dim=-1)
            module.save_pretrained(folder)
        except Exception as error:  # as above
            return f"not made: fails by itself with {str(error).strip()[:80]!r}"
        try:
            llm = LLM(folder, num_kv_blocks=16, block_size=4, max_num_batched_tokens=8, threads=1)
        except ValueError as error:
            return f"refused: {str(error).removeprefix(repr(folder)).strip()}"
        except Exception as error:  # never meant to be
            return f"WRONG {type(error).__name__}: {error}"
        with llm:
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    difference = max(
        abs(entry[token].logprob - expected[position, token].item())
        for position, (entry, token) in enumerate(
            zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
        )
    )
    config = module.config.get_text_config()
    has_window = hasattr(type(config), "sliding_window") and config.sliding_window is not None
    return (
        f"{'right' if difference < 1e-4 else 'WRONG'} {difference:.1e}"
        f"{f', window of {config.sliding_window}' if has_window else ''}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
