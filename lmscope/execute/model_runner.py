"""ModelRunner: turns a SchedulerOutput into one forward of the model and sampled tokens.

It knows only what the scheduler told it, as differences, step by step. Prefill and decode
are not told apart: each request brings some tokens, all of them form one flat row, and the
module runs once.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from lmscope_kernels.batch_checks import check_batch, check_slots
from numpy.typing import NDArray
from torch import Tensor

from lmscope.boundary import LogprobsLists, ModelRunnerOutput, NewRequestData, SchedulerOutput
from lmscope.execute.input_batch import CachedRequestState, InputBatch, PreparedInputs
from lmscope.execute.prompt_logprobs import PromptLogprobs
from lmscope.execute.random_draws import derived_seed
from lmscope.execute.sampler import Sampler
from lmscope.execute.sampling_row import SamplingRow
from lmscope.models.attention import BatchView, KVCache
from lmscope.models.attention_mass import AttentionMass, ByHead
from lmscope.models.body import ModelBody
from lmscope.models.loader import LoadedModel

__all__ = ["BY_HEAD_INTERVAL_S", "ExecuteModelState", "ModelRunner"]

# What each layer and head gives is megabytes a step, so at most five steps a second keep it.
BY_HEAD_INTERVAL_S = 0.2


class _PromptRows(NamedTuple):
    """Rows of logits that belong to a prompt: what follows position `first` and on."""

    request: CachedRequestState
    first: int
    num_rows: int


class ExecuteModelState(NamedTuple):
    """What execute_model leaves for sample_tokens.

    rows           rows of the batch that sample a token
    logits         [sampled rows + prompt rows, V], first those of `rows`, in their order
    prompt_rows    whom the others belong to, in their order
    mass           what each block was attended to, when somebody measures it
    """

    step: int
    rows: list[int]
    logits: Tensor
    prompt_rows: list[_PromptRows]
    mass: AttentionMass | None


class ModelRunner:
    """Owns the keys and values, the rows of the batch and the sampler of one engine.

    num_blocks       block 0 included
    max_model_len    most tokens of a request; the model's own limit unless given
    body             what runs the model; the exact one unless given
    seed             of requests without a seed of their own
    check_batches    raise ValueError, with the request, for a slot or a block beyond the pool
    clock            seconds; says how long ago a step kept what each layer and head gives
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        seed: int = 0,
        max_model_len: int | None = None,
        body: ModelBody | None = None,
        *,
        check_batches: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loaded = loaded
        self._body = loaded.body(exact=True) if body is None else body
        self.block_size = block_size
        self.kv_cache = KVCache.allocate(
            loaded.num_layers,
            num_blocks,
            block_size,
            loaded.num_kv_heads,
            loaded.head_size,
            loaded.dtype,
            loaded.device,
        )
        self.requests: dict[str, CachedRequestState] = {}
        self.input_batch = InputBatch(
            max_num_seqs, max_model_len or loaded.max_model_len, block_size
        )
        self.sampler = Sampler(loaded.vocab_size)
        self.sampler.prepare(loaded.device)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._seed = seed
        self._num_seen = 0
        self._checks_batches = check_batches
        self._stop_ids = frozenset(loaded.eos_token_ids) | (
            frozenset() if loaded.eos_token_id is None else {loaded.eos_token_id}
        )
        self._pending: ExecuteModelState | None = None
        # how many measure, and how many of them want each layer and head
        self._num_measuring = 0
        self._num_by_head = 0
        # whether the step that is prepared keeps those, and when one may again
        self._keeps_heads = False
        self._heads_due = -math.inf
        self._clock = clock
        self.attention_by_head = ByHead(0, {})

    def measure_attention(self, more: int, more_by_head: int) -> None:
        """Count those who want `attention_mass` in the outputs, and those who want it by head."""
        self._num_measuring += more
        self._num_by_head += more_by_head
        if not self._num_by_head:
            self.attention_by_head = ByHead(0, {})

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model; the tokens come from sample_tokens, which must be called next.

        Returns an output without rows at once for a step without tokens.
        """
        if self._pending is not None:
            raise RuntimeError(
                f"step {self._pending.step} waits for sample_tokens, which must be called before "
                f"step {scheduler_output.step} runs"
            )
        self._update_states(scheduler_output)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if num_tokens == 0:
            return ModelRunnerOutput(step=scheduler_output.step, time=time.monotonic())
        assert num_tokens <= self._max_num_batched_tokens

        self._keeps_heads = self._are_heads_due()
        inputs = self._prepare(scheduler_output.num_scheduled_tokens)
        if self._checks_batches:
            self._check(inputs)
        rows = np.flatnonzero(inputs.is_sampled)
        indices = [inputs.query_start_loc[rows + 1] - 1]
        prompt_rows = self._prompt_rows(inputs, indices)
        mass = self._attention_mass(inputs)
        self._pending = ExecuteModelState(
            step=scheduler_output.step,
            rows=rows.tolist(),
            logits=self._forward(inputs, np.concatenate(indices), mass),
            prompt_rows=prompt_rows,
            mass=mass,
        )
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: None = None) -> ModelRunnerOutput:
        """Sample a token for each row that is not in the middle of its prompt."""
        if self._pending is None:
            raise RuntimeError("sample_tokens needs an execute_model before it")
        pending, self._pending = self._pending, None
        batch = self.input_batch
        requests = batch.requests
        num_sampled = len(pending.rows)
        self._add_prompt_logprobs(pending)

        token_ids: list[tuple[int, ...]] = [()] * len(requests)
        logprobs: list[LogprobsLists | None] = [None] * len(requests)
        prompt_logprobs = {}
        errors = {}
        if num_sampled:
            sampled = self.sampler.sample(
                pending.logits[:num_sampled], [requests[row].sampling for row in pending.rows]
            )
            batch.append_tokens(pending.rows, sampled.token_ids)
            for row, token_id, lists in zip(
                pending.rows, sampled.token_ids, sampled.logprobs, strict=True
            ):
                request = requests[row]
                token_ids[row] = (token_id,)
                logprobs[row] = lists
                if request.prompt_logprobs is not None:
                    prompt_logprobs[request.req_id] = request.prompt_logprobs.result()
                    request.prompt_logprobs = None
            errors = {
                requests[pending.rows[index]].req_id: message
                for index, message in sampled.errors.items()
            }
        return ModelRunnerOutput(
            step=pending.step,
            time=time.monotonic(),
            req_ids=batch.req_ids,
            sampled_token_ids=tuple(token_ids),
            logprobs=tuple(logprobs) if any(logprobs) else None,
            prompt_logprobs_dict=prompt_logprobs,
            errors=errors,
            attention_mass=self._take_mass(pending.step, pending.mass),
        )

    def _add_prompt_logprobs(self, pending: ExecuteModelState) -> None:
        done = len(pending.rows)
        for part in pending.prompt_rows:
            assert part.request.prompt_logprobs is not None
            part.request.prompt_logprobs.add(
                part.first, pending.logits[done : done + part.num_rows]
            )
            done += part.num_rows

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Make the rows those of this step's requests, each with what it knows now."""
        batch = self.input_batch
        # Before new ones: an id may end and come again in the same step.
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
            batch.remove_request(request_id)
        cached = scheduler_output.scheduled_cached_reqs
        resumed = frozenset(cached.resumed_req_ids)
        scheduled = scheduler_output.num_scheduled_tokens
        all_token_ids = cached.all_token_ids
        for request_id in (*(batch.req_id_to_index.keys() - scheduled.keys()), *resumed):
            batch.remove_request(request_id)

        without_row = []
        for new in scheduler_output.scheduled_new_reqs:
            assert new.req_id not in self.requests, f"{new.req_id} is new a second time"
            request = self.requests[new.req_id] = self._new_request(new)
            without_row.append(request)
        rows: list[int] = []
        computed: list[int] = []
        for request_id, num_computed_tokens, groups, num_output_tokens in zip(
            cached.req_ids,
            cached.num_computed_tokens,
            cached.new_block_ids,
            cached.num_output_tokens,
            strict=True,
        ):
            request = self.requests[request_id]
            request.num_computed_tokens = num_computed_tokens
            if request_id in resumed:
                request.block_ids.clear()
            if groups is not None:
                request.block_ids.extend(groups[0])
            are_tokens_changed = False
            if request_id in all_token_ids or num_output_tokens < len(request.output_token_ids):
                are_tokens_changed = self._take_tokens(
                    request, all_token_ids.get(request_id), num_output_tokens
                )
            row = batch.req_id_to_index.get(request_id)
            if row is None:
                without_row.append(request)
                continue
            rows.append(row)
            computed.append(num_computed_tokens)
            if groups is not None:
                batch.append_block_ids(row, groups[0])
            if are_tokens_changed:
                batch.set_tokens(row)
        batch.num_computed_tokens[rows] = computed
        for request in without_row:
            batch.add_request(request)
        batch.condense()

    def _new_request(self, new: NewRequestData) -> CachedRequestState:
        params = new.sampling_params
        seed = derived_seed(self._seed, self._num_seen) if params.seed is None else params.seed
        self._num_seen += 1
        output_token_ids: list[int] = []
        return CachedRequestState(
            sampling=SamplingRow(
                request_id=new.req_id,
                params=params,
                prompt_token_ids=new.prompt_token_ids,
                output_token_ids=output_token_ids,
                seed=seed,
                stop_ids=self._stop_ids.union(params.stop_token_ids),
                bad_words_ids=(
                    self.loaded.tokenizer.encode_bad_words(params.bad_words)
                    if params.bad_words
                    else ()
                ),
            ),
            output_token_ids=output_token_ids,
            block_ids=list(new.block_ids[0]),
            num_computed_tokens=new.num_computed_tokens,
            prompt_logprobs=(
                None
                if params.prompt_logprobs is None
                else PromptLogprobs(
                    new.prompt_token_ids, params.prompt_logprobs, self.sampler.prompt_logprobs
                )
            ),
        )

    def _take_tokens(
        self,
        request: CachedRequestState,
        all_token_ids: tuple[int, ...] | None,
        num_output_tokens: int,
    ) -> bool:
        """Make the outputs those that the scheduler has; whether that changed anything.

        Normally it does not: what was sampled here is known here. A scheduler may have
        discarded the last of them, or hold ones that were given from outside.
        """
        output_token_ids = request.output_token_ids
        if all_token_ids is not None:
            outputs = all_token_ids[len(request.sampling.prompt_token_ids) :]
            if tuple(output_token_ids) == outputs:
                return False
            output_token_ids[:] = outputs
            # Whoever counted the tokens of the row counts again.
            request.sampling = dataclasses.replace(request.sampling)
            return True
        if num_output_tokens < len(output_token_ids):
            del output_token_ids[num_output_tokens:]
            return True
        return False

    def _prepare(self, num_scheduled_tokens: Mapping[str, int]) -> PreparedInputs:
        """This step's batch as arrays."""
        return self.input_batch.prepare(num_scheduled_tokens)

    def _check(self, inputs: PreparedInputs) -> None:
        num_blocks = self.kv_cache.key[0].shape[0]
        check_batch(
            torch.from_numpy(inputs.block_table),
            torch.from_numpy(inputs.seq_lens),
            torch.from_numpy(inputs.query_start_loc),
            num_rows=len(inputs.token_ids),
            num_blocks=num_blocks,
            block_size=self.block_size,
        )
        check_slots(torch.from_numpy(inputs.slot_mapping), num_slots=num_blocks * self.block_size)

    def _prompt_rows(
        self, inputs: PreparedInputs, indices: list[NDArray[np.int32]]
    ) -> list[_PromptRows]:
        """Whose prompts want log probabilities; appends the tokens that give them."""
        prompt_rows = []
        for row, request in enumerate(self.input_batch.requests):
            if request.prompt_logprobs is None:
                continue
            start, end = inputs.query_start_loc[row : row + 2].tolist()
            first = request.num_computed_tokens
            num_rows = request.prompt_logprobs.num_rows(first, end - start)
            if num_rows:
                prompt_rows.append(_PromptRows(request, first, num_rows))
                indices.append(np.arange(start, start + num_rows, dtype=np.int32))
        return prompt_rows

    def _attention_mass(self, inputs: PreparedInputs) -> AttentionMass | None:
        if not self._num_measuring:
            return None
        num_reqs = len(self.input_batch.requests)
        return AttentionMass(
            query_start_loc=inputs.query_start_loc[: num_reqs + 1],
            seq_lens=inputs.seq_lens[:num_reqs],
            block_table=inputs.block_table[:num_reqs],
            block_size=self.block_size,
            device=self.loaded.device,
            keeps_heads=self._keeps_heads,
        )

    def _are_heads_due(self) -> bool:
        """Whether this step keeps what each layer and head gives; the next ones then do not."""
        if not self._num_by_head:
            return False
        now = self._clock()
        if now < self._heads_due:
            return False
        self._heads_due = now + BY_HEAD_INTERVAL_S
        return True

    def _take_mass(self, step: int, mass: AttentionMass | None) -> dict[str, tuple[float, ...]]:
        """The shares of each request; what is kept by head is replaced."""
        if mass is None:
            return {}
        req_ids = self.input_batch.req_ids
        if mass.keeps_heads:
            self._keep_heads(step, dict(zip(req_ids, mass.by_head(), strict=True)))
        return dict(zip(req_ids, mass.shares(), strict=True))

    def _keep_heads(self, step: int, shares: dict[str, NDArray[np.float32]]) -> None:
        if self._num_by_head:  # somebody still wants them
            self.attention_by_head = ByHead(step, shares)

    def _forward(
        self, inputs: PreparedInputs, indices: NDArray[np.int32], mass: AttentionMass | None
    ) -> Tensor:
        """Logits of the tokens at `indices` of the flat batch, [len(indices), V]."""
        device = self.loaded.device
        batch = BatchView.build(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_table=inputs.block_table,
            block_size=self.block_size,
            device=device,
            windows=self.loaded.windows,
            is_softcapped=self.loaded.is_softcapped,
            mass=mass,
        )
        token_ids = torch.from_numpy(inputs.token_ids).to(device)
        return self._body(token_ids, batch, self.kv_cache, indices)
