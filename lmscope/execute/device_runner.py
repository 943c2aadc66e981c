"""DeviceRunner: a ModelRunner that never waits for its device within a step.

The batch is copied into buffers that stay where they are, the kernels attend, tokens are drawn on
the device and come back through pinned memory. The next step may be given to the device before
the tokens of this one are known on the host: those that it needs are taken from where they were
drawn. Under Triton's interpreter the same code runs on a CPU, where nothing is asynchronous.

Rows with penalties, biases or log probabilities are the Sampler's: for those the host waits.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from lmscope_kernels.paged_decode import DecodeWorkspace, decode_tile
from lmscope_kernels.triton_support import capability
from numpy.typing import NDArray
from torch import Tensor

from lmscope.boundary import ModelRunnerOutput, SchedulerOutput
from lmscope.config import EngineConfig
from lmscope.execute.cuda_graphs import DecodeGraphs, capture_cuda_graph
from lmscope.execute.device_inputs import DeviceBatch, DeviceInputs, make_current
from lmscope.execute.device_sampler import DeviceSampler
from lmscope.execute.input_batch import CachedRequestState, PreparedInputs
from lmscope.execute.invariant_sampler import InvariantSampler
from lmscope.execute.model_runner import ExecuteModelState, ModelRunner
from lmscope.execute.pending_output import Landing, PendingOutput, Ring
from lmscope.execute.sampler import errors_of
from lmscope.models.attention import BatchView
from lmscope.models.attention_mass import AttentionMass, by_head_of, shares_of
from lmscope.models.body import ModelBody
from lmscope.models.kernel_attention import DecodeMass, DecodeScratch, KernelAttention
from lmscope.models.loader import LoadedModel

__all__ = ["DeviceRunner"]

_UNKNOWN = -1  # in the place of an output token that the host has yet to learn


class _Result(NamedTuple):
    """What one forward leaves on the device: logits [R, V], and the mass if it was measured."""

    logits: Tensor
    mass: DecodeMass | None


@dataclass(slots=True)
class _Unresolved:
    """A step whose tokens the host does not have yet: whose, and where in their outputs."""

    landing: Landing
    places: list[tuple[CachedRequestState, int]]


class DeviceRunner(ModelRunner):
    """Runs the steps of one engine with the Triton kernels."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        body: ModelBody,
        num_blocks: int,
        block_size: int,
    ) -> None:
        super().__init__(
            loaded,
            num_blocks,
            block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.seed,
            config.max_model_len,
            body,
            check_batches=config.check_batches,
        )
        device = loaded.device
        max_num_reqs = config.max_num_seqs
        self._max_blocks = self.input_batch.block_table.shape[1]
        self._inputs = DeviceInputs(
            config.max_num_batched_tokens, max_num_reqs, self._max_blocks, device
        )
        self._is_invariant = config.batch_invariant
        # Decoding rows take the kernel that prompts take, and none has splits, in an engine
        # whose bits must not depend on what else is in the batch.
        self._scratch = (
            None
            if self._is_invariant
            else DecodeScratch(
                max_num_reqs,
                loaded.num_query_heads,
                loaded.head_size,
                self._max_blocks * block_size,
                device,
            )
        )
        num_keys, *_ = decode_tile(loaded.dtype, loaded.head_size, block_size, capability(device))
        # Only then can the decode kernel say what each block receives.
        self._do_blocks_fill_tiles = num_keys % block_size == 0
        self._device_sampler = DeviceSampler(
            max_num_reqs,
            loaded.vocab_size,
            device,
            self._inputs.turns,
            batch_invariant=self._is_invariant,
        )
        if self._is_invariant:
            self.sampler = InvariantSampler(loaded.vocab_size, self._device_sampler)
        self._ring = Ring(max_num_reqs, device)
        self._landing = self._ring.take()
        self._unresolved: list[_Unresolved] = []
        self._last_tokens: Tensor | None = None
        # Requests whose newest token the device has and the host has not, and its place there.
        self._place_of: dict[str, int] = {}
        # Of the step that was prepared last.
        self._num_new = np.zeros(0, dtype=np.int64)
        self._graph_size: tuple[int, int] | None = None
        self._decode_mass: DecodeMass | None = None
        self._graphs: DecodeGraphs[_Result] | None = None
        self._logits: Tensor | None = None  # of the graphs, made by the first decode
        if device.type == "cuda" and not config.enforce_eager:
            # What graphs read must stay where it is, so tables are as long as they will be.
            self._tables = body.reserve_positions(self._max_blocks * block_size)
            self._graphs = DecodeGraphs(
                self._run_decode,
                max_num_reqs,
                self._max_blocks,
                partial(capture_cuda_graph, pool=torch.cuda.graph_pool_handle()),
            )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        make_current(self.loaded.device)
        # First: the scheduler may know tokens that have landed here since.
        self._resolve(must_wait=False)
        return super().execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(  # type: ignore[override]  # EngineCore asks for the output when it needs it
        self, grammar_output: None = None
    ) -> ModelRunnerOutput | PendingOutput:
        """As of a ModelRunner; the tokens may still be on their way when it returns."""
        if self._pending is None:
            raise RuntimeError("sample_tokens needs an execute_model before it")
        pending = self._pending
        requests = self.input_batch.requests
        rows = [requests[row].sampling for row in pending.rows]
        try:
            if not self._device_sampler.takes(rows) or any(
                request.prompt_logprobs is not None for request in requests
            ):
                # It looks at all tokens so far.
                self._resolve(must_wait=True)
                self._place_of.clear()
                return super().sample_tokens(grammar_output)
            self._pending = None
            return self._sample_on_device(pending, requests)
        finally:
            self._inputs.turns.end()

    def _sample_on_device(
        self, pending: ExecuteModelState, requests: list[CachedRequestState]
    ) -> PendingOutput:
        batch = self.input_batch
        rows = pending.rows
        landing = self._landing
        device = self.loaded.device
        if rows:
            tokens, scores = self._device_sampler.sample(
                pending.logits[: len(rows)], [requests[row].sampling for row in rows]
            )
        else:
            tokens = torch.empty(0, dtype=torch.int64, device=device)
            scores = torch.empty(0, dtype=torch.float32, device=device)
        watched = self._watched(pending.mass or self._decode_mass)
        landing.copy(tokens, scores, watched)
        places = [(requests[row], len(requests[row].output_token_ids)) for row in rows]
        batch.append_tokens(rows, [_UNKNOWN] * len(rows))
        self._place_of = {requests[row].req_id: index for index, row in enumerate(rows)}
        self._last_tokens = tokens
        self._unresolved.append(_Unresolved(landing, places))
        return PendingOutput(
            landing,
            partial(self._build, pending.step, batch.req_ids, rows, landing, self._num_blocks()),
        )

    def _watched(self, mass: AttentionMass | DecodeMass | None) -> dict[str, Tensor]:
        """What else is to come from the device, beside tokens."""
        if mass is None:
            return {}
        watched = {"mean": mass.mean()}
        if mass.keeps_heads:
            watched["heads"] = mass.heads()
        return watched

    def _build(
        self,
        step: int,
        req_ids: tuple[str, ...],
        rows: list[int],
        landing: Landing,
        num_blocks: NDArray[np.int32],
    ) -> ModelRunnerOutput:
        """The output of a step that has come; changes nothing but what is kept by head."""
        sampled: list[tuple[int, ...]] = [()] * len(req_ids)
        for row, token_id in zip(rows, landing.tokens[: len(rows)].tolist(), strict=True):
            sampled[row] = (token_id,)
        errors = errors_of(landing.scores[: len(rows)])
        mass: dict[str, tuple[float, ...]] = {}
        num_reqs = len(req_ids)
        if "mean" in landing.watched:
            mean = landing.watched["mean"][:num_reqs].numpy()
            mass = dict(zip(req_ids, shares_of(mean, num_blocks), strict=True))
        if "heads" in landing.watched:
            heads = landing.watched["heads"][:num_reqs].numpy()
            self._keep_heads(step, dict(zip(req_ids, by_head_of(heads, num_blocks), strict=True)))
        return ModelRunnerOutput(
            step=step,
            time=time.monotonic(),
            req_ids=req_ids,
            sampled_token_ids=tuple(sampled),
            errors={req_ids[rows[index]]: message for index, message in errors.items()},
            attention_mass=mass,
            device_duration_s=landing.duration_s(),
        )

    def _prepare(self, num_scheduled_tokens: Mapping[str, int]) -> PreparedInputs:
        """Pads a decode batch to what graphs are captured for."""
        batch = self.input_batch
        num_reqs = batch.num_reqs
        self._num_new = np.fromiter(
            (num_scheduled_tokens[request.req_id] for request in batch.requests), np.int64, num_reqs
        )
        self._graph_size = None
        if self._graphs is not None and bool((self._num_new == 1).all()):
            longest = int(batch.num_computed_tokens[:num_reqs].max()) + 1
            if not self._body.is_touched():
                self._graph_size = self._graphs.padded(num_reqs, -(-longest // self.block_size))
        padded = 0 if self._graph_size is None else self._graph_size[0]
        return batch.prepare(num_scheduled_tokens, padded, padded)

    def _attention_mass(self, inputs: PreparedInputs) -> AttentionMass | None:
        """Of the keys, read once more; the decode kernel measures while it attends."""
        return None if self._mass_kind(inputs) is not None else super()._attention_mass(inputs)

    def _mass_kind(self, inputs: PreparedInputs) -> str | None:
        """What the decode kernel measures in this step; None: nothing, or it does not run."""
        num_reqs, num_blocks = self._decode_size(inputs)
        if (
            not self._num_measuring
            or inputs.num_tokens != self.input_batch.num_reqs
            or not self._do_blocks_fill_tiles
            or self._workspace(num_reqs, num_blocks) is None
        ):
            return None
        return "heads" if self._keeps_heads else "mean"

    def _decode_size(self, inputs: PreparedInputs) -> tuple[int, int]:
        """Requests and blocks a table of a decode batch, padding included."""
        return self._graph_size or (len(inputs.seq_lens), inputs.block_table.shape[1])

    def _forward(
        self, inputs: PreparedInputs, indices: NDArray[np.int32], mass: AttentionMass | None
    ) -> Tensor:
        batch = self.input_batch
        num_reqs, num_rows = batch.num_reqs, len(inputs.token_ids)
        self._landing = self._ring.take()
        self._landing.start()
        on_device = self._inputs.load(
            inputs,
            batch.block_table,
            batch.take_table_changes(),
            self._unknown_tokens(inputs),
            self._last_tokens,
        )
        self._decode_mass = None
        if inputs.num_tokens != num_reqs or mass is not None:
            is_all = len(indices) == num_rows and bool((indices == np.arange(num_rows)).all())
            view = self._view(on_device, int(inputs.seq_lens.max()), None, None, mass)
            rows = None if is_all else self._inputs.load_logit_rows(indices)
            return self._body.logits(on_device.token_ids, view, self.kv_cache, rows)
        size, kind = self._decode_size(inputs), self._mass_kind(inputs)
        if self._graph_size is None:
            result = self._run_decode(*size, kind)
        else:
            assert self._graphs is not None
            result = self._graphs(*size, kind)
        self._decode_mass = result.mass
        if len(indices) == num_reqs and bool((indices == np.arange(num_reqs)).all()):
            return result.logits[:num_reqs]
        return result.logits.index_select(0, self._inputs.load_logit_rows(indices))

    def _run_decode(self, num_reqs: int, num_blocks: int, kind: Hashable) -> _Result:
        """One forward of a batch in the buffers that has one row a request, padding included."""
        loaded = self.loaded
        buffers = self._inputs.buffers(num_reqs, num_reqs, num_blocks)
        mass = None
        if kind is not None:
            mass = DecodeMass(
                num_reqs, loaded.num_query_heads, num_blocks, loaded.device, kind == "heads"
            )
        workspace = self._workspace(num_reqs, num_blocks)
        view = self._view(buffers, num_blocks * self.block_size, workspace, mass, None)
        logits = self._body.logits(buffers.token_ids, view, self.kv_cache, None)
        if self._graphs is not None:
            # One place for all graphs: each would keep its own, gigabytes of a large vocabulary.
            if self._logits is None:
                self._logits = logits.new_empty(self._graphs.most_reqs, logits.shape[1])
            if num_reqs <= len(self._logits):
                logits = self._logits[:num_reqs].copy_(logits)
        return _Result(logits, mass)

    def _workspace(self, num_reqs: int, num_blocks: int) -> DecodeWorkspace | None:
        """For the decode kernel; None where it does not run and the other one does."""
        if self._scratch is None:
            return None
        return self._scratch.workspace(num_reqs, num_blocks * self.block_size)

    def _view(
        self,
        on_device: DeviceBatch,
        max_seq_len: int,
        workspace: DecodeWorkspace | None,
        decode_mass: DecodeMass | None,
        mass: AttentionMass | None,
    ) -> BatchView:
        kernels = KernelAttention(
            slot_mapping=on_device.slot_mapping,
            query_start_loc=on_device.query_start_loc,
            seq_lens=on_device.seq_lens,
            block_table=on_device.block_table,
            workspace=workspace,
            mass=decode_mass,
            has_fixed_tile=self._is_invariant,
        )
        return BatchView.of_kernels(
            kernels, positions=on_device.positions, max_seq_len=max_seq_len, mass=mass
        )

    def _unknown_tokens(self, inputs: PreparedInputs) -> list[tuple[int, int]]:
        """Tokens of the batch that the step before sampled and the host does not know yet."""
        unknown = np.flatnonzero(inputs.token_ids == _UNKNOWN)
        if not len(unknown):
            return []
        requests = self.input_batch.requests
        rows = np.searchsorted(inputs.query_start_loc, unknown, side="right") - 1
        places = []
        for index, row in zip(unknown.tolist(), rows.tolist(), strict=True):
            places.append((index, self._place_of[requests[row].req_id]))
            # Nobody reads it, and it would be no token.
            inputs.token_ids[index] = 0
        return places

    def _resolve(self, must_wait: bool) -> None:
        """Write the tokens that have come where the host keeps them.

        must_wait    all of them; else those that are here
        """
        while self._unresolved:
            first = self._unresolved[0]
            if must_wait:
                first.landing.wait()
            elif not first.landing.is_here():
                return
            tokens = first.landing.tokens[: len(first.places)].tolist()
            for (request, place), token_id in zip(first.places, tokens, strict=True):
                self.input_batch.fill_token(request, place, token_id)
            self._unresolved.pop(0)

    def _take_mass(
        self, step: int, mass: AttentionMass | DecodeMass | None
    ) -> dict[str, tuple[float, ...]]:
        """Where the host waits anyway, of what either way measured."""
        watched = self._watched(mass or self._decode_mass)
        if not watched:
            return {}
        req_ids = self.input_batch.req_ids
        num_blocks = self._num_blocks()
        here = {name: tensor[: len(req_ids)].cpu().numpy() for name, tensor in watched.items()}
        if "heads" in here:
            heads = by_head_of(here["heads"], num_blocks)
            self._keep_heads(step, dict(zip(req_ids, heads, strict=True)))
        return dict(zip(req_ids, shares_of(here["mean"], num_blocks), strict=True))

    def _num_blocks(self) -> NDArray[np.int32]:
        """Of each request's table, in the step that was prepared last."""
        num_tokens = self.input_batch.num_computed_tokens[: len(self._num_new)] + self._num_new
        blocks: NDArray[np.int64] = -(-num_tokens // self.block_size)
        return blocks.astype(np.int32)
