"""Loads a model through transformers, from a hub id, a folder, a GGUF file, or "demo"."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lmscope.checks import nearest
from lmscope.models.attention import ATTENTION_NAME
from lmscope.models.batch_invariant import invariant_method
from lmscope.models.body import ModelBody
from lmscope.models.device_choice import choose_device, choose_dtype
from lmscope.models.early_packing import EarlyPacking
from lmscope.models.fuse import NotLean, lean_layout
from lmscope.models.gguf_linears import choose_gguf_method
from lmscope.models.linear import GGUF_NAME, Fp16PackedLinears, choose_linear_method
from lmscope.models.model_folder import in_which_files
from lmscope.models.model_source import find_model, gguf_source
from lmscope.models.packed import PackedLinears
from lmscope.models.stored_model import load_stored
from lmscope.models.support import (
    ModelShape,
    check_supported,
    longest_unstretched_length,
    rope_settings,
)
from lmscope.models.swap import linear_layers, swapped_linears
from lmscope.models.telling import is_stderr_watched, tell_of_compiling

__all__ = ["LoadedModel", "load_model"]

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Names that configs give to the most positions a model was trained for.
_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, and what others must know of it.

    module           in eval mode, without gradients; its attention needs a batch of ours
    tokenizer        what was loaded or given; None: there is none
    path             a hub id or a folder; transformers loads the same model from it
    gguf_file        what the folder was made of; None: of no GGUF file
    windows          each sliding window that some layer has, once; None: a layer without one
    is_softcapped    some layer's attention scores have a soft cap
    eos_token_id     the tokenizer's; where it has none, the first of the next
    eos_token_ids    every id that the generation config ends a text with
    """

    module: torch.nn.Module
    tokenizer: Any
    path: str
    gguf_file: Path | None
    max_model_len: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    windows: tuple[int | None, ...]
    is_softcapped: bool
    dtype: torch.dtype
    device: torch.device
    eos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    parameter_bytes: int
    _bodies: _Bodies = field(default_factory=lambda: _Bodies(), repr=False, compare=False)

    def body(
        self,
        *,
        exact: bool,
        quantization: str | None = None,
        batch_invariant: bool = False,
        attention_backend: str = "torch",
    ) -> ModelBody:
        """What runs the module; made once for each choice of options, and then shared.

        exact              weights in the dtype of the module, as F.linear multiplies by them
        quantization       how weights are stored where that changes results; None: not at all
        batch_invariant    a token has the same bits alone and in any batch
        attention_backend  what attends; "triton": all that is to be batch-invariant runs in its
                           kernels. Of no effect otherwise

        ValueError when the quantization cannot be had, or the model cannot be run batch-invariant.
        """
        with self._bodies.lock:
            in_kernels = batch_invariant and attention_backend == "triton"
            key = exact, quantization, batch_invariant, in_kernels
            if key not in self._bodies.made:
                tell_of_compiling()
                chosen = (
                    choose_gguf_method(self.module, Path(self.path), self.gguf_file, self.device)
                    if quantization == GGUF_NAME
                    else choose_linear_method(
                        exact=exact, quantization=quantization, dtype=self.dtype, device=self.device
                    )
                )
                if in_kernels:
                    # Here, not above: a start on a CPU need not wait for the kernels.
                    from lmscope.models.kernel_invariant import kernel_invariant_method

                    chosen = kernel_invariant_method()
                elif batch_invariant:
                    chosen = invariant_method(chosen)
                chosen.warn()
                shape = ModelShape(**{name: getattr(self, name) for name in ModelShape._fields})
                is_early = isinstance(chosen.method, Fp16PackedLinears) and not batch_invariant
                self._bodies.made[key] = ModelBody(
                    self.module,
                    chosen,
                    shape,
                    batch_invariant=batch_invariant,
                    in_kernels=in_kernels,
                    packed=self._bodies.packed if is_early else None,
                )
                if self._bodies.are_weights_watched:
                    self._bodies.made[key].watch_weights()
            return self._bodies.made[key]

    def watch_weights(self) -> None:
        """Whoever is given the module after this may write to its weights, and it is noticed.

        Not from the start: it takes weights into memory that nobody else reads.
        """
        with self._bodies.lock:
            if not self._bodies.are_weights_watched:
                self._bodies.are_weights_watched = True
                for body in self._bodies.made.values():
                    body.watch_weights()

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


class _Bodies:
    """The bodies of one loaded model, by their options.

    packed    the weights in half precision, if they were packed while the model was loaded
    """

    def __init__(self, packed: PackedLinears | None = None) -> None:
        self.lock = threading.Lock()
        self.packed = packed
        self.are_weights_watched = False
        self.made: dict[tuple[bool, str | None, bool, bool], ModelBody] = {}


def load_model(
    model: str | Path,
    *,
    tokenizer: Any = None,
    load_tokenizer: Callable[[str], Any] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    show_progress: bool | None = None,
    early: EarlyPacking | None = None,
) -> LoadedModel:
    """Load weights and perhaps a tokenizer, and prove that the model runs right.

    model            "demo", a hub id, a folder, or a .gguf file. Weights are safetensors or
                     GGUF; nothing is unpickled
    tokenizer        the model's own unless given: another hub id or folder, or an object
    load_tokenizer   makes a tokenizer of a folder or a hub id; without it none is loaded
    dtype            "auto": what the checkpoint has, and float32 on a CPU, which is several
                     times slower with less
    device           "auto": CUDA where there is any
    show_progress    bars on stderr; None: where somebody sees them, in a terminal or notebook
    early            packs the weights meanwhile

    Raises ValueError when there is no such model, when its files do not fit together, and when
    lmscope cannot run it; LmscopeError when the demo model cannot be fetched.
    """
    chosen_device = choose_device(device)
    are_bars_shown = is_stderr_watched() if show_progress is None else show_progress
    source = find_model(model, are_bars_shown)
    options = {"trust_remote_code": trust_remote_code}
    # Weights that are made in somebody's inference mode do not tell when they are written to.
    with _transformers_progress(are_bars_shown), torch.inference_mode(False):
        config = _load_config(source, options)
        chosen_dtype = choose_dtype(dtype, getattr(config, "dtype", None), chosen_device)
        module = _load_module(source, config, chosen_dtype, options)
        loaded_tokenizer = _load_tokenizer(tokenizer, source, load_tokenizer)
    module = _to_device(module, chosen_device).eval().requires_grad_(False)
    packed = None if early is None else _packed_early(module, early)
    # By packed weights, so that the others need not be read for it.
    with swapped_linears({} if packed is None else packed.layers):
        shape = check_supported(module)

    text_config = config.get_text_config(decoder=True)
    generation_config: Any = module.generation_config
    generation_ids = _as_ids(generation_config.eos_token_id) or _as_ids(text_config.eos_token_id)
    own_id = getattr(loaded_tokenizer, "eos_token_id", None)
    loaded = LoadedModel(
        module=module,
        tokenizer=loaded_tokenizer,
        path=source,
        gguf_file=gguf_source(model),
        max_model_len=_max_model_len(source, text_config),
        **shape._asdict(),
        dtype=chosen_dtype,
        device=chosen_device,
        eos_token_id=own_id if own_id is not None else next(iter(generation_ids), None),
        eos_token_ids=generation_ids,
        parameter_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
        _bodies=_Bodies(packed),
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


def _to_device(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The module there; ValueError, with the numbers, where its weights find no room."""
    try:
        return module.to(device)
    except torch.OutOfMemoryError as error:
        num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        free, total = torch.cuda.mem_get_info(device)
        raise ValueError(
            f"the weights take {num_bytes / 1e9:.2f} GB, and of {total / 1e9:.2f} GB on {device} "
            f"{free / 1e9:.2f} GB are free; close other engines and processes on it, load a "
            "smaller model, or use device='cpu'"
        ) from error


def _packed_early(module: torch.nn.Module, early: EarlyPacking) -> PackedLinears | None:
    """The layers of a module that runs lean; None: they are packed when it is known what runs."""
    try:
        groups = lean_layout(module).groups()
    except NotLean:
        return None
    return PackedLinears(early.chosen, linear_layers(module), groups, early)


def _load_config(source: str, options: dict[str, Any]) -> Any:
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        advice = (
            "check its config.json, and that transformers knows this architecture"
            if Path(source).is_dir()
            else "check the name and the connection, or give a folder"
        )
        raise ValueError(
            f"the config of {source!r} cannot be loaded ({_in_one_line(error)}); {advice}"
        ) from error
    return config


def _load_module(
    source: str, config: Any, dtype: torch.dtype, options: dict[str, Any]
) -> torch.nn.Module:
    """The model with all of its weights, or ValueError with what does not fit."""
    stored: torch.nn.Module | None = load_stored(Path(source), config, dtype)
    if stored is not None:
        return stored
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            # Otherwise the shapes that do not fit go to a log and not into the error.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ValueError(
            f"{source!r} cannot be loaded as a language model of type "
            f"{config.model_type!r}: {_why(error, config)}"
        ) from error
    unset, unused = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    misshapen = sorted(
        f"{name} {tuple(found)} for {tuple(wanted)}"
        for name, found, wanted in report["mismatched_keys"]
    )
    if unset or unused or misshapen:
        # Such parameters would be random numbers, and such weights left out.
        folder = Path(source)
        files = in_which_files(folder, unset) if unset and folder.is_dir() else ()
        raise ValueError(
            f"the weights of {source!r} do not fit {type(module).__name__}: "
            f"missing {unset[:8] or 'nothing'}{' in ' if files else ''}{', '.join(files)}, "
            f"unused {unused[:8] or 'nothing'}"
            f"{', of another shape ' if misshapen else ''}{', '.join(misshapen[:8])}; "
            "fetch its files again"
        )
    loaded: torch.nn.Module = module
    _tie(loaded, source)
    return loaded


def _why(error: Exception, config: Any) -> str:
    """What a model class could not do; of a missing key, transformers says the bare key."""
    if error.args == (ATTENTION_NAME,):
        return "its attention is its own and takes no other, so it cannot run in lmscope"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, which lmscope cannot run"
    if "use_safetensors" in str(error):
        return "it has no safetensors, and other weights can run any code when they are read"
    known = ("default", *ROPE_INIT_FUNCTIONS)
    for rope in rope_settings(config.get_text_config(decoder=True)):
        kind = str(rope.get("rope_type", "default"))
        if kind not in known:
            return f"its rotary embedding is of type {kind!r}; {nearest(kind, known)}"
    return _in_one_line(error)


def _tie(module: Any, source: str) -> None:
    """Make a tied model's head its embedding, also where the checkpoint holds another head."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    is_tied = getattr(module.config, "tie_word_embeddings", False)
    if is_tied and head is not None and head.weight is not embedding.weight:
        logger.warning(
            "%s has a head other than its embedding, and its config says that they are tied; "
            "the embedding is used for both",
            source,
        )
        head.weight = embedding.weight


def _load_tokenizer(
    tokenizer: Any, source: str, load_tokenizer: Callable[[str], Any] | None
) -> Any:
    """The model's tokenizer, or the one given; None when there is none or nobody loads it."""
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return tokenizer
    if load_tokenizer is None:
        return None
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
        return load_tokenizer(place)
    except Exception as error:  # tokenizers raises nothing narrower for a file it cannot read
        raise ValueError(
            f"the tokenizer of {place!r} cannot be loaded ({_in_one_line(error)}); "
            "give another with tokenizer=, a hub id, a folder or an object"
        ) from error


def _max_model_len(source: str, config: Any) -> int:
    lengths = [getattr(config, name, None) for name in _LENGTH_NAMES]
    length = next((each for each in lengths if isinstance(each, int) and each > 0), None)
    if length is None:
        raise ValueError(
            f"the config of this {config.model_type} model states no greatest length "
            f"({', '.join(_LENGTH_NAMES)}); add max_position_embeddings to its config.json"
        )
    unstretched = longest_unstretched_length(config)
    if unstretched is None:
        return length
    kind, limit = unstretched
    # Keys in the cache, and other requests in the batch, would need another stretch.
    logger.warning(
        "the rotary embedding of %s (%s) changes for all of a batch when a request gets longer "
        "than %d tokens; the model runs up to that length",
        source,
        kind,
        limit,
    )
    return min(length, limit)


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


def _in_one_line(error: BaseException) -> str:
    """The beginning of a message: its first line, and the next where that ends in a colon."""
    lines = [line.strip() for line in str(error).strip().split("\n")]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300]
