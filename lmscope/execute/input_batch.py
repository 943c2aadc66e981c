"""InputBatch: what the runner knows of each request, row by row, kept from step to step.

A step changes little, so rows stay where they are: a request that leaves makes a hole, the
next that comes takes the lowest hole, and what is left open is closed by moving the last row
down. Preparing a step is then a few vectorised operations over arrays that are already there.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmscope.execute.prompt_logprobs import PromptLogprobs
from lmscope.execute.sampling_row import SamplingRow

__all__ = ["CachedRequestState", "InputBatch", "PreparedInputs"]


@dataclass(slots=True)
class CachedRequestState:
    """A request that the runner knows, with a row in the batch or, while it waits, without.

    sampling            its id, prompt and parameters, as the sampler sees them
    output_token_ids    one list for the whole life of the request, which `sampling` reads
    prompt_logprobs     None when not asked for, or when they are on their way already
    """

    sampling: SamplingRow
    output_token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def req_id(self) -> str:
        return self.sampling.request_id

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was sampled."""
        return len(self.sampling.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True)
class PreparedInputs:
    """One step's batch as arrays; T tokens and R requests, padding included.

    token_ids          [T]       int64; 0 in padding
    positions          [T]       int64, of each token in its request; 0 in padding
    slot_mapping       [T]       int64, where its key and value go; -1 in padding
    query_start_loc    [R + 1]   int32, first token of each row; the last value in padding
    seq_lens           [R]       int32, tokens after this step; 0 in padding
    block_table        [R, max_blocks]   int32; 0, the null block, where a row has none
    is_sampled         [rows]    False for a prefill that is not finished; no padding here
    """

    num_tokens: int
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    is_sampled: NDArray[np.bool_]


class InputBatch:
    """Rows of requests that run in this step.

    Add and remove as the scheduler says, then `condense()`, then `prepare(...)`.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        # Row -> request; None in a hole, which only exists between a change and condense().
        self._requests: list[CachedRequestState | None] = []
        self._holes: list[int] = []
        # What `req_ids` gives; None when rows have changed since it was last asked.
        self._req_ids: tuple[str, ...] | None = None
        self.req_id_to_index: dict[str, int] = {}
        self._max_num_reqs = max_num_reqs
        # The system hands these pages out when they are first written, so a large
        # max_model_len costs nothing by itself.
        self.token_ids = np.zeros((max_num_reqs, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.block_table = np.zeros((max_num_reqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_reqs, dtype=np.int64)
        # Row -> the first place of its block table that was written since somebody took these.
        self._first_change: dict[int, int] = {}

    @property
    def num_reqs(self) -> int:
        return len(self.req_id_to_index)

    @property
    def req_ids(self) -> tuple[str, ...]:
        """The requests in the order of their rows."""
        if self._req_ids is None:
            self._req_ids = tuple([request.req_id for request in self.requests])
        return self._req_ids

    @property
    def requests(self) -> list[CachedRequestState]:
        """Row by row; only after condense()."""
        assert not self._holes, "condense() comes first"
        return self._requests  # type: ignore[return-value]  # no holes, so no None

    def add_request(self, request: CachedRequestState) -> int:
        """Give a request the lowest free row, with all it knows; returns the row."""
        self._req_ids = None
        if self._holes:
            row = heapq.heappop(self._holes)
            self._requests[row] = request
        else:
            row = len(self._requests)
            assert row < self._max_num_reqs, f"more than {self._max_num_reqs} requests in a step"
            self._requests.append(request)
        self.req_id_to_index[request.req_id] = row
        self.set_tokens(row)
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.append_block_ids(row, request.block_ids)
        return row

    def remove_request(self, req_id: str) -> None:
        """Take a request's row away; one that has no row is fine."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is not None:
            self._req_ids = None
            self._requests[row] = None
            self._clear_blocks(row)
            heapq.heappush(self._holes, row)

    def append_block_ids(self, row: int, block_ids: Sequence[int]) -> None:
        start = self.num_blocks[row]
        end = start + len(block_ids)
        self.block_table[row, start:end] = block_ids
        self.num_blocks[row] = end
        self._first_change[row] = min(self._first_change.get(row, int(start)), int(start))

    def take_table_changes(self) -> list[tuple[int, int, int]]:
        """Row, start and end of what was written to the block table since the last time.

        Of a row that lost its request, what is still there is nobody's, and not among them.
        """
        changes, self._first_change = self._first_change, {}
        return [
            (row, start, int(self.num_blocks[row]))
            for row, start in changes.items()
            if start < self.num_blocks[row]
        ]

    def set_tokens(self, row: int) -> None:
        """Copy a request's known tokens into its row, after a change other than an append."""
        request = self._requests[row]
        assert request is not None
        num_prompt_tokens = len(request.sampling.prompt_token_ids)
        num_tokens = min(request.num_tokens, self.token_ids.shape[1])
        self.token_ids[row, :num_prompt_tokens] = request.sampling.prompt_token_ids
        self.token_ids[row, num_prompt_tokens:num_tokens] = request.output_token_ids[
            : num_tokens - num_prompt_tokens
        ]
        self.num_tokens[row] = request.num_tokens

    def append_tokens(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Sampled tokens become part of their requests and of the next step's input.

        rows    different ones
        """
        requests = self.requests
        for row, token_id in zip(rows, token_ids, strict=True):
            requests[row].output_token_ids.append(token_id)
        index = np.asarray(rows, dtype=np.int64)
        columns = self.num_tokens[index]
        # The last token that max_model_len allows is never an input, so it has no column.
        has_column = columns < self.token_ids.shape[1]
        self.token_ids[index[has_column], columns[has_column]] = np.asarray(token_ids)[has_column]
        self.num_tokens[index] += 1

    def fill_token(self, request: CachedRequestState, place: int, token_id: int) -> None:
        """Write an output token that was appended before it was known.

        place    among the output tokens; a request that has taken it back since is left alone
        """
        if place >= len(request.output_token_ids):
            return
        request.output_token_ids[place] = token_id
        row = self.req_id_to_index.get(request.req_id)
        column = len(request.sampling.prompt_token_ids) + place
        if row is not None and self._requests[row] is request and column < self.token_ids.shape[1]:
            self.token_ids[row, column] = token_id

    def condense(self) -> None:
        """Move the last row into the lowest hole until none is left."""
        while self._holes:
            last = len(self._requests) - 1
            if self._requests[last] is None:
                self._holes.remove(last)
                heapq.heapify(self._holes)
            else:
                self._move(last, heapq.heappop(self._holes))
            self._requests.pop()

    def prepare(
        self,
        num_scheduled_tokens: Mapping[str, int],
        num_padded_tokens: int = 0,
        num_padded_reqs: int = 0,
    ) -> PreparedInputs:
        """The inputs of a step in which each row gets its number of tokens, all above 0.

        Pads to the given numbers where they are larger than the batch, which a captured graph
        needs. Costs some ten microseconds and little more per token.
        """
        num_reqs = len(self.requests)
        num_new = np.array([num_scheduled_tokens[req_id] for req_id in self.req_ids], np.int64)
        computed = self.num_computed_tokens[:num_reqs]
        ends = np.cumsum(num_new)
        num_tokens = int(ends[-1])
        seq_lens = computed + num_new
        # The row of each token, and its position: with 2, 5 and 3 tokens the rows are
        # 0 0 1 1 1 1 1 2 2 2 and the offsets inside a row 0 1 0 1 2 3 4 0 1 2.
        rows = np.repeat(np.arange(num_reqs), num_new)
        positions = np.arange(num_tokens) + np.repeat(computed - ends + num_new, num_new)
        blocks = self.block_table[rows, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size

        starts = np.zeros(num_reqs + 1, dtype=np.int32)
        starts[1:] = ends
        max_blocks = -(-int(seq_lens.max()) // self.block_size)
        return PreparedInputs(
            num_tokens=num_tokens,
            token_ids=_padded(
                self.token_ids[rows, positions].astype(np.int64), num_padded_tokens, 0
            ),
            positions=_padded(positions, num_padded_tokens, 0),
            slot_mapping=_padded(slots, num_padded_tokens, -1),
            query_start_loc=_padded(starts, num_padded_reqs + 1, num_tokens),
            seq_lens=_padded(seq_lens.astype(np.int32), num_padded_reqs, 0),
            block_table=_padded(
                self.block_table[:num_reqs, :max_blocks].copy(), num_padded_reqs, 0
            ),
            is_sampled=seq_lens >= self.num_tokens[:num_reqs],
        )

    def _move(self, source: int, target: int) -> None:
        request = self._requests[source]
        assert request is not None
        self._requests[target] = request
        self.req_id_to_index[request.req_id] = target
        num_tokens, num_blocks = self.num_tokens[source], self.num_blocks[source]
        self.token_ids[target, :num_tokens] = self.token_ids[source, :num_tokens]
        self.block_table[target, :num_blocks] = self.block_table[source, :num_blocks]
        for column in (self.num_tokens, self.num_computed_tokens, self.num_blocks):
            column[target] = column[source]
        self._first_change[target] = 0
        self._clear_blocks(source)

    def _clear_blocks(self, row: int) -> None:
        self.block_table[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0


def _padded(array: NDArray[Any], length: int, value: int) -> NDArray[Any]:
    """`array` with `value` behind it up to `length`; itself when it is as long already."""
    if len(array) >= length:
        return array
    padding = np.full((length - len(array), *array.shape[1:]), value, dtype=array.dtype)
    return np.concatenate((array, padding))
