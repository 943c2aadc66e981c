"""ModelBody: runs a loaded model for one step, the leanest way that is right now.

There are two ways: the lean forward, and the module of transformers with the same packed
weights. The module runs when the lean forward does not know it, and in every step in which
somebody listens inside it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lmscope_kernels.decode_attention_cpu import decode_kernel_choice, prepare_decode_kernel
from lmscope_kernels.half_linear_cpu import prepare_half_loops, why_no_half_loops
from lmscope_kernels.numba_support import has_safe_threads
from lmscope_kernels.prompt_attention_cpu import prepare_prompt_kernel
from lmscope_kernels.triton_support import is_available
from numpy.typing import NDArray
from torch import Tensor

from lmscope.models.attention import BatchView, KVCache
from lmscope.models.batch_invariant import InvariantForward
from lmscope.models.fuse import LeanForward, LeanLayout, NotLean, lean_layout
from lmscope.models.linear import ChosenMethod, PlainLinears
from lmscope.models.module_watch import ModuleWatch
from lmscope.models.packed import PackedLinears
from lmscope.models.plan import ExecutionPlan, PlanLine
from lmscope.models.support import ModelShape
from lmscope.models.swap import linear_layers, swapped_linears

__all__ = ["ModelBody"]

logger = logging.getLogger(__name__)

# Largest difference between the two ways, as a part of the largest number. They round in other
# places, so with less precision they differ more; a forward that is wrong differs by all of it.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class ModelBody:
    """A module and what runs it. Engines that share weights share it; it keeps no step."""

    def __init__(
        self,
        module: torch.nn.Module,
        chosen: ChosenMethod,
        shape: ModelShape,
        *,
        batch_invariant: bool = False,
        in_kernels: bool = False,
        packed: PackedLinears | None = None,
    ) -> None:
        """Packs the weights and proves the lean forward against the module, once.

        batch_invariant    a row has the same bits alone and in any batch; ValueError where the
                           module has no forward that is so
        in_kernels         by the Triton kernels, which then attend too; else as on a CPU
        packed             the weights, if they have been packed as chosen
        """
        self.module = module
        self._chosen = chosen
        self._is_invariant = batch_invariant
        self._is_in_kernels = in_kernels
        self._is_warned = self._is_warned_of_hooks = False
        weight = next(module.parameters())
        self._dtype = weight.dtype
        self._decode_kernel = decode_kernel_choice(weight.dtype, weight.device)
        if self._decode_kernel.name == "numba":
            prepare_decode_kernel()
            prepare_prompt_kernel()
            if why_no_half_loops() is None and chosen.method.name != PlainLinears.name:
                prepare_half_loops()
        layout, self._not_lean = _layout_of(module, weight, in_kernels)
        if packed is None:
            groups = [] if layout is None else layout.groups()
            packed = PackedLinears(chosen, linear_layers(module), groups)
        self._packed = packed
        self._lean: LeanForward | None = None
        if layout is not None:
            device = next(module.parameters()).device
            lean = self._make_lean(layout, device)
            if lean is not None:
                self._not_lean = _difference(lean, self._run_module, shape, device)
                self._lean = lean if self._not_lean is None else None
        if batch_invariant and self._lean is None:
            raise ValueError(
                f"batch_invariant is True, and {type(module).__name__} cannot be run so: "
                f"{self._not_lean}; leave it out, or load another model"
            )
        self._watch = ModuleWatch(module, is_lean=self._lean is not None)
        if not packed.are_weights_unread:
            self._watch.sample_weights()

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: Tensor,
        batch: BatchView,
        kv_cache: KVCache,
        indices: NDArray[np.integer[Any]],
    ) -> Tensor:
        """Logits of the tokens at `indices` of the flat batch, [len(indices), V].

        token_ids    [T]
        """
        device = token_ids.device
        is_all = len(indices) == len(token_ids) and bool(
            (indices == np.arange(len(token_ids))).all()
        )
        rows = None if is_all else torch.from_numpy(indices.astype(np.int64)).to(device)
        return self.logits(token_ids, batch, kv_cache, rows)

    @torch.inference_mode()
    def logits(
        self, token_ids: Tensor, batch: BatchView, kv_cache: KVCache, rows: Tensor | None
    ) -> Tensor:
        """The same with indices that are on the device already; None: all tokens, in order."""
        if len(token_ids) != batch.num_reqs:
            self._watch.look_into_weights()
        if self._lean is not None and self._why_module() is None:
            return self._lean(token_ids, batch, kv_cache, rows)
        dtype = next(self.module.parameters()).dtype
        if dtype != self._dtype:
            raise ValueError(
                f"llm.module was turned into {_name(dtype)} after it was loaded, and its keys and "
                f"values are {_name(self._dtype)}; load the model with dtype={_name(dtype)!r}"
            )
        if rows is None:
            rows = torch.arange(len(token_ids), device=token_ids.device)
        return self._run_module(token_ids, batch, kv_cache, rows)

    def plan(self, threads: PlanLine, attention: PlanLine | None = None) -> ExecutionPlan:
        """What a step would run now.

        attention    of the kernels, where they attend; None: torch does
        """
        reason = f"no lean forward: {self._not_lean}" if self._lean is None else self._why_module()
        if reason is None:
            assert self._lean is not None
            body = PlanLine(
                "lean forward",
                f"the module is a {self._lean.layout.family} without hooks, and both ways gave "
                "the same logits"
                + (
                    "; one to four decoding requests run in one call a layer"
                    if self._lean.runs_layers_in_one_call
                    else ""
                )
                + (
                    "; numba compiled what is between the products"
                    if self._lean.is_compiled_between_products
                    else ""
                ),
            )
            if self._is_invariant:
                body = PlanLine(
                    "batch-invariant forward",
                    "batch_invariant=True: a token has the same bits alone and in any batch; "
                    + body.why,
                )
        else:
            body = PlanLine("module of transformers", reason)
        packed = self._packed
        parameters = list(self.module.parameters())
        weight_bytes = sum(p.numel() * p.element_size() for p in parameters)
        is_on_one_thread = self._decode_kernel.name == "numba" and not has_safe_threads()
        kept = f"{weight_bytes / 1e6:.0f} MB of weights in llm.module"
        if packed.are_weights_unread:
            kept += ", which stay in their file until somebody looks at them"
        return ExecutionPlan(
            body=body,
            linears=packed.line(self._are_weights_changed()),
            head=packed.head_line(self.module, self._are_weights_changed()),
            attention=attention
            or PlanLine(
                "over the paged cache, "
                + ("each row by itself, " if self._is_invariant else "")
                + f"in {self._decode_kernel.name}",
                self._decode_kernel.why
                + (
                    "; compiled loops run on one thread, since numba has none here that two "
                    "engines may share"
                    if is_on_one_thread
                    else ""
                ),
            ),
            threads=threads,
            dtype=PlanLine(_name(parameters[0].dtype)),
            memory=PlanLine(
                f"{packed.num_bytes / 1e6:.0f} MB packed and {kept}"
                if packed.num_bytes
                else f"{kept}, and no copy"
            ),
        )

    def _make_lean(self, layout: LeanLayout, device: torch.device) -> LeanForward | None:
        dtype = layout.embedding.dtype
        if not self._is_invariant:
            if device.type == "cuda":
                # Here, not above: a start on a CPU need not wait for the kernels.
                from lmscope.models.kernel_forward import KernelForward, uses_kernels

                if uses_kernels(layout, device):
                    return KernelForward(layout, self._packed.groups, device)
            if dtype == torch.float32:
                return LeanForward(layout, self._packed.groups, device)
            self._not_lean = f"the kernels cannot take the sizes of its norms in {dtype}"
            return None
        try:
            if self._is_in_kernels:
                from lmscope.models.kernel_invariant import KernelInvariantForward

                return KernelInvariantForward(layout, self._packed.groups, device)
            return InvariantForward(layout, self._packed.groups, device, self._decode_kernel)
        except NotLean as reason:
            self._not_lean = str(reason)
            return None

    def reserve_positions(self, num_positions: int) -> tuple[Tensor, ...]:
        """Make what is looked up by position so long that no step makes it longer.

        Returns what was made: whoever captures a graph that reads it must keep it.
        """
        return () if self._lean is None else self._lean.reserve_positions(num_positions)

    def watch_weights(self) -> None:
        """Somebody is about to get the module: notice what is written into its weights."""
        self._watch.sample_weights()

    def is_touched(self) -> bool:
        """Whether somebody listens in the module or changed it, since it was loaded.

        A captured graph would not notice, so such steps must not be run from one.
        """
        return self._why_module() is not None

    def _why_module(self) -> str | None:
        """Why a step must go through the module now; None: it need not."""
        if self._watch.is_listened_to():
            if self._is_invariant and not self._is_warned_of_hooks:
                self._is_warned_of_hooks = True
                logger.warning(
                    "somebody has hooks in llm.module, so steps run through it and are not "
                    "batch-invariant; remove the hooks for steps that are"
                )
            return "somebody has hooks in llm.module"
        if self._are_weights_changed():
            return "llm.module was changed after it was loaded"
        return None

    def _are_weights_changed(self) -> bool:
        is_changed = self._watch.is_changed()
        if is_changed and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "llm.module was changed after it was loaded, so steps run through it, by "
                "F.linear, which is %s; call llm.reset_prefix_cache(), since keys and values that "
                "are cached are of what it was, and load the changed model for packed weights",
                "slower and not batch-invariant" if self._is_invariant else "slower",
            )
        return is_changed

    def _run_module(
        self, token_ids: Tensor, batch: BatchView, kv_cache: KVCache, rows: Tensor
    ) -> Tensor:
        linears = {} if self._is_stale() else self._packed.layers
        with swapped_linears(linears):
            output: Any = self.module(
                input_ids=token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                # Only these rows go through the head, the largest matrix of a small model.
                logits_to_keep=rows,
                lmscope_batch=batch,
                lmscope_cache=kv_cache,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _is_stale(self) -> bool:
        return hasattr(self, "_watch") and self._are_weights_changed()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout_of(
    module: torch.nn.Module, weight: Tensor, in_kernels: bool
) -> tuple[LeanLayout | None, str | None]:
    has_kernels = weight.is_cuda and is_available(weight.device, weight.dtype)[0]
    try:
        return lean_layout(module, takes_any_dtype=has_kernels or in_kernels), None
    except NotLean as reason:
        return None, str(reason)


def _difference(
    lean: LeanForward, run_module: Any, shape: ModelShape, device: torch.device
) -> str | None:
    """Why the lean forward gives other logits than the module; None: it gives the same.

    Two requests, one in the middle of its prompt and one behind keys of its own, so that
    positions and the cache count.
    """
    block_size, num_blocks = 4, 5
    query_lens, seq_lens = np.array([3, 2], dtype=np.int32), np.array([3, 7], dtype=np.int32)
    positions = np.array([0, 1, 2, 5, 6], dtype=np.int64)
    table = np.array([[1, 0], [2, 3]], dtype=np.int32)
    slots = np.array([4, 5, 6, 13, 14], dtype=np.int64)
    batch = BatchView.build(
        positions=positions,
        slot_mapping=slots,
        query_start_loc=np.array([0, *np.cumsum(query_lens)], dtype=np.int32),
        seq_lens=seq_lens,
        block_table=table,
        block_size=block_size,
        device=device,
        windows=shape.windows,
        is_softcapped=shape.is_softcapped,
    )
    token_ids = torch.arange(5, device=device) * 7 % shape.vocab_size
    rows = torch.tensor([4, 2, 0], device=device)

    def run(forward: Any) -> tuple[Tensor, KVCache]:
        cache = KVCache.allocate(
            shape.num_layers,
            num_blocks,
            block_size,
            shape.num_kv_heads,
            shape.head_size,
            lean.layout.embedding.dtype,
            device,
        )
        for each in (*cache.key, *cache.value):
            each.fill_(0.5)
        return forward(token_ids, batch, cache, rows), cache

    with torch.inference_mode():
        got, got_cache = run(lean)
        wanted, wanted_cache = run(run_module)
    pairs: Iterable[tuple[Tensor, Tensor]] = (
        (got, wanted),
        *zip(got_cache.key, wanted_cache.key, strict=True),
        *zip(got_cache.value, wanted_cache.value, strict=True),
    )
    worst = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)
    # Not `>`: NaN is a difference.
    if not worst <= _TOLERANCE[lean.layout.embedding.dtype]:
        return f"it differed from the module by {worst:.2g} of the largest number"
    return None
