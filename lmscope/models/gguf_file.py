"""A GGUF file as a plain folder: safetensors, config and tokenizer, as transformers loads them.

transformers reads the config and the tokenizer out of the file; `gguf` dequantises the
tensors to float32. Three things differ between the two formats and are undone here: the names,
the order of the rows of Llama's query and key projections, and scaled rotary embeddings, which
GGUF keeps as one divisor per frequency.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from lmscope_kernels.gguf_linear_cpu import pack_blocks, why_not_packed
from numpy.typing import NDArray
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

__all__ = ["convert_gguf", "write_blocks"]

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_ROPE_FACTORS = "rope_freqs.weight"
_SHARD_BYTES = 2 << 30


def convert_gguf(file: Path, folder: Path, *, show_progress: bool = True) -> None:
    """Write the model in `file` into the existing, empty `folder`, with float32 weights.

    Holds one shard of 2 GiB in memory at a time. Raises ValueError for an architecture it
    cannot convert, and when the tensors in the file are not exactly those of the model.
    """
    reader = _open(file)
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"{file.name} holds a model of architecture {architecture!r}; GGUF files of "
            f"{', '.join(_ARCHITECTURES)} can be read, so load this model from safetensors"
        )
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**source)
    head_size = reader.fields.get(f"{architecture}.attention.key_length")
    if head_size is not None:
        # transformers does not read it for every architecture, and then takes a default.
        config.head_dim = int(head_size.contents())
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if _ROPE_FACTORS in tensors:
        config.rope_parameters = _scaled_rope(config, tensors.pop(_ROPE_FACTORS).data)

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(module).__name__]
    config.dtype = torch.float32
    names = _match_names(module, architecture, tensors, file)

    total = sum(4 * parameter.numel() for name, parameter in module.named_parameters())
    progress = tqdm(
        total=total,
        desc=f"converting {file.name}",
        unit="B",
        unit_scale=True,
        disable=not show_progress,
    )
    with progress:
        _write_weights(_converted(names, tensors, config, architecture, progress), total, folder)
    config.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        # safetensors writes for the owner only; a cache may be shared like any other file.
        shutil.copymode(folder / "config.json", weights)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def write_blocks(file: Path, module: Any, target: Path) -> None:
    """Write what of `file` is in blocks that gguf_linear multiplies by, to a safetensors file.

    Under the name of the parameter of `module`, which was made of the file, and ".quanta",
    ".scales" and ".minima".
    """
    reader = _open(file)
    architecture = reader.fields["general.architecture"].contents()
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name != _ROPE_FACTORS}
    packed = {}
    for name, stored_name in _match_names(module, architecture, tensors, file).items():
        stored = tensors[stored_name]
        quantization = stored.tensor_type.name
        # The file states shapes from the last dimension to the first.
        if why_not_packed([int(size) for size in reversed(stored.shape)], quantization) is None:
            data = _in_order(stored.data, name, architecture, module.config)
            for part, tensor in pack_blocks(data, quantization)._asdict().items():
                packed[f"{name}.{part}"] = tensor
    save_file(packed, target)


def _open(file: Path) -> Any:
    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, OSError) as error:
        raise ValueError(f"{file} is not a readable GGUF file ({error}); fetch it again") from error


def _match_names(
    module: torch.nn.Module, architecture: str, tensors: dict[str, Any], file: Path
) -> dict[str, str]:
    """Name in the module -> name in the file, for each parameter of the module.

    Raises ValueError, with names, when either side has one that the other lacks.
    """
    known = gguf.get_tensor_name_map(
        _ARCHITECTURES[architecture],
        module.config.num_hidden_layers,  # type: ignore[union-attr]  # transformers' own
    )
    # Tied weights are listed once here, under the name of the embedding.
    names = {
        name: known.get_name(name, try_suffixes=(".weight", ".bias")) or name
        for name, _ in module.named_parameters()
    }
    missing = sorted(set(names.values()) - set(tensors))
    unused = sorted(set(tensors) - set(names.values()))
    if missing or unused:
        raise ValueError(
            f"{file.name} does not fit a model of architecture {architecture!r}: "
            f"missing {missing[:8] or 'nothing'}, unused {unused[:8] or 'nothing'}"
        )
    return names


def _converted(
    names: dict[str, str],
    tensors: dict[str, Any],
    config: Any,
    architecture: str,
    progress: tqdm[Any],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under their names in the module, float32, one after the other."""
    for name, stored_name in names.items():
        stored = tensors[stored_name]
        array = gguf.dequantize(stored.data, stored.tensor_type)
        array = _in_order(array, name, architecture, config)
        progress.update(array.nbytes)
        yield name, torch.from_numpy(np.array(array, dtype=np.float32, order="C"))


def _in_order(array: NDArray[Any], name: str, architecture: str, config: Any) -> NDArray[Any]:
    """Rows of a parameter, numbers or blocks of them, in the order of the module."""
    if architecture == "llama" and ".q_proj." in name:
        return _halves_apart(array, config.num_attention_heads)
    if architecture == "llama" and ".k_proj." in name:
        return _halves_apart(array, config.num_key_value_heads)
    return array


def _halves_apart(array: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of each head from pairs (0, D/2, 1, D/2 + 1, ...) back to 0, 1, 2, ...

    GGUF stores what rotates together side by side; transformers rotates element i with
    element i + D/2.
    """
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _scaled_rope(config: Any, factors: NDArray[np.float32]) -> dict[str, Any]:
    """The rotary settings whose frequencies are the plain ones divided by `factors`.

    Llama 3 divides low frequencies by a factor, leaves high ones alone and blends between.
    The file has the quotients only, so its settings are tried and must give exactly those.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = config.rope_parameters
    scaled = {
        **plain,
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config.rope_parameters = scaled
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, 2 * len(factors), 2, dtype=torch.float32) / (2 * len(factors))
    expected = 1.0 / (plain["rope_theta"] ** exponents) / torch.from_numpy(np.array(factors))
    if not torch.allclose(frequencies, expected, rtol=1e-4):
        raise ValueError(
            f"the file scales its rotary embedding by {_ROPE_FACTORS} in a way that is not "
            "Llama 3's; load this model from safetensors"
        )
    return scaled


def _write_weights(
    tensors: Iterator[tuple[str, torch.Tensor]], total_bytes: int, folder: Path
) -> None:
    """One model.safetensors, or several and their index when the model is large."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}

    def close_shard() -> None:
        save_file(shard, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > _SHARD_BYTES:
            close_shard()
        shard[name] = tensor
    close_shard()

    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, tensor_names in enumerate(shards):
        file_name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file_name)
        weight_map.update(dict.fromkeys(tensor_names, file_name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
