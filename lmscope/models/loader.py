"""Loads a model through transformers, from a hub id, a folder, a GGUF file, or "demo"."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lmscope.checks import nearest
from lmscope.config import cache_folder
from lmscope.models.attention import ATTENTION_NAME
from lmscope.models.cache import locked_cache, scratch_folder
from lmscope.models.demo import ensure_demo_model
from lmscope.models.support import check_supported

__all__ = ["LoadedModel", "load_model"]

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Names that configs give to the most positions a model was trained for.
_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, and what others must know of it.

    module           in eval mode, without gradients; its attention needs a batch of ours
    tokenizer        transformers' own, or the one that was given; None: there is none
    path             a hub id or a folder; transformers loads the same model from it
    eos_token_id     the tokenizer's; where it has none, the first of the next
    eos_token_ids    every id that the generation config ends a text with
    """

    module: torch.nn.Module
    tokenizer: Any
    path: str
    max_model_len: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    eos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    parameter_bytes: int

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block: keys and values, in all layers."""
        numbers = self.num_layers * block_size * self.num_kv_heads * self.head_size
        return 2 * numbers * self.dtype.itemsize

    def kv_formula(self, block_size: int) -> str:
        """The same in words, with its numbers."""
        return (
            f"2 (K and V) x {self.num_layers} layers x {block_size} tokens x "
            f"{self.num_kv_heads} KV heads x {self.head_size} x {self.dtype.itemsize} bytes"
        )


def load_model(
    model: str | Path,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    show_progress: bool = True,
) -> LoadedModel:
    """Load weights and tokenizer, and prove that the model runs right.

    model        "demo", a hub id, a folder, or a .gguf file. Weights are safetensors or GGUF;
                 nothing is unpickled
    tokenizer    the model's own unless given: another hub id or folder, or an object
    dtype        "auto": what the checkpoint has, and float32 on a CPU, which is several times
                 slower with less
    device       "auto": CUDA where there is any

    Raises ValueError when there is no such model, when its files do not fit together, and when
    lmscope cannot run it; LmscopeError when the demo model cannot be fetched.
    """
    chosen_device = _choose_device(device)
    source = _find(model, show_progress)
    options = {"trust_remote_code": trust_remote_code}
    with _transformers_progress(show_progress):
        config = _load_config(source, options)
        chosen_dtype = _choose_dtype(dtype, config, chosen_device)
        module = _load_module(source, config, chosen_dtype, options)
        loaded_tokenizer = _load_tokenizer(tokenizer, source, options)
    module = module.to(chosen_device).eval().requires_grad_(False)
    shape = check_supported(module)

    text_config = config.get_text_config(decoder=True)
    generation_config: Any = module.generation_config
    generation_ids = _as_ids(generation_config.eos_token_id) or _as_ids(text_config.eos_token_id)
    own_id = getattr(loaded_tokenizer, "eos_token_id", None)
    loaded = LoadedModel(
        module=module,
        tokenizer=loaded_tokenizer,
        path=source,
        max_model_len=_max_model_len(text_config),
        **shape._asdict(),
        dtype=chosen_dtype,
        device=chosen_device,
        eos_token_id=own_id if own_id is not None else next(iter(generation_ids), None),
        eos_token_ids=generation_ids,
        parameter_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
    )
    logger.info(
        "loaded %s: %s, %.0f MB in %s on %s",
        source,
        type(module).__name__,
        loaded.parameter_bytes / 1e6,
        str(chosen_dtype).removeprefix("torch."),
        chosen_device,
    )
    return loaded


def _find(model: str | Path, show_progress: bool) -> str:
    """The folder or hub id that transformers loads `model` from; checks a folder's files."""
    if model == "demo":
        return str(ensure_demo_model(show_progress))
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"there is no file {str(model)!r}; check the path of the GGUF file")
        return str(_converted(path, show_progress))
    if path.is_dir():
        _check_folder(path)
        return str(path)
    # A hub id is one name or two; anything else was meant as a path.
    if isinstance(model, Path) or model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise ValueError(
            f"there is no folder {str(model)!r}; give a folder with safetensors, a .gguf file, "
            'a hub id such as "Qwen/Qwen3-0.6B", or "demo"'
        )
    return model


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json, so it is not a model that transformers saved; "
            "give the folder that save_pretrained() wrote"
        )
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} has its weights in {pickled[0]}, which can run any code when it is read; "
            "lmscope reads safetensors only, so load it once with transformers and save it with "
            "save_pretrained()"
        )
    raise ValueError(f"{folder} has no weights; it must hold model.safetensors or its parts")


def _converted(file: Path, show_progress: bool) -> Path:
    """The folder made of a GGUF file, kept in the cache until the file changes."""
    state = file.stat()
    identity = f"{file.resolve()}|{state.st_size}|{state.st_mtime_ns}"
    folder = f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    target = cache_folder() / "gguf" / folder
    if target.is_dir():
        return target
    with locked_cache() as cache:
        if not target.is_dir():
            # Here, not above: other models need not load gguf.
            from lmscope.models.gguf_file import convert_gguf

            with scratch_folder(cache) as scratch:
                converted = scratch / folder
                converted.mkdir()
                convert_gguf(file, converted, show_progress=show_progress)
                target.parent.mkdir(exist_ok=True)
                os.replace(converted, target)
    return target


def _load_config(source: str, options: dict[str, Any]) -> Any:
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"the config of {source!r} cannot be loaded ({_first_line(error)}); check the name, "
            "the connection, and that transformers knows this architecture"
        ) from error
    return config


def _load_module(
    source: str, config: Any, dtype: torch.dtype, options: dict[str, Any]
) -> torch.nn.Module:
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ValueError(
            f"{source!r} cannot be loaded as a language model of type "
            f"{config.model_type!r}: {_first_line(error)}"
        ) from error
    unset, unused = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if unset or unused:
        # Such parameters would be random numbers, and such weights left out.
        raise ValueError(
            f"the weights of {source!r} do not fit {type(module).__name__}: "
            f"missing {unset[:8] or 'nothing'}, unused {unused[:8] or 'nothing'}; "
            "fetch its files again"
        )
    loaded: torch.nn.Module = module
    return loaded


def _load_tokenizer(tokenizer: Any, source: str, options: dict[str, Any]) -> Any:
    """The model's tokenizer, or the one given; None when the model has none."""
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return tokenizer
    place = source if tokenizer is None else str(tokenizer)
    folder = Path(place)
    if (
        tokenizer is None
        and folder.is_dir()
        and not any((folder / name).is_file() for name in _TOKENIZER_FILES)
    ):
        logger.warning("%s has no tokenizer, so prompts must be token ids", source)
        return None
    try:
        return AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"the tokenizer of {place!r} cannot be loaded ({_first_line(error)}); "
            "give another with tokenizer=, a hub id, a folder or an object"
        ) from error


def _choose_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; it takes 'auto', 'cpu' or 'cuda'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r} and torch finds no CUDA device; use device='cpu'")
    return chosen


def _choose_dtype(dtype: str | torch.dtype, config: Any, device: torch.device) -> torch.dtype:
    if isinstance(dtype, str):
        if dtype == "auto":
            stored = getattr(config, "dtype", None) or torch.float32
            known = stored if stored in _DTYPES.values() else torch.float32
            return torch.float32 if device.type == "cpu" else known
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}; {nearest(dtype, ('auto', *_DTYPES))}")
        return _DTYPES[dtype]
    if dtype not in _DTYPES.values():
        raise ValueError(f"dtype is {dtype}; it takes 'auto', {', '.join(map(repr, _DTYPES))}")
    return dtype


def _max_model_len(config: Any) -> int:
    for name in _LENGTH_NAMES:
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    raise ValueError(
        f"the config of this {config.model_type} model states no greatest length "
        f"({', '.join(_LENGTH_NAMES)}); add max_position_embeddings to its config.json"
    )


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(dict.fromkeys(value))


@contextmanager
def _transformers_progress(show: bool) -> Iterator[None]:
    """Without `show`, transformers draws no bars inside; its own setting comes back after."""
    log = transformers.utils.logging
    was_shown = log.is_progress_bar_enabled()
    if not show:
        log.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            log.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]
