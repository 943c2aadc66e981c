"""A worker without a model, which remembers what it has written into each slot of each block.

It knows a scheduler only by its SchedulerOutputs, as a model runner does, and shares no code
with one. Before it answers it looks every key up that a request would attend to, so a block
that is handed out twice, hit under a wrong name, or hit before it was ever computed is an
error in the step in which it would have changed the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from lmscope.boundary import ModelRunnerOutput, SchedulerOutput

__all__ = ["ScriptedWorker", "names_of"]


def names_of(token_ids: Iterable[int]) -> list[int]:
    """For each token a number that stands for it and all before it, as its key does."""
    return list(accumulate(token_ids, lambda name, token_id: hash((name, token_id)), initial=0))[1:]


class _Known:
    """What a worker knows of one request."""

    def __init__(self, token_ids: tuple[int, ...], block_ids: tuple[int, ...]) -> None:
        self.num_prompt_tokens = len(token_ids)
        self.token_ids = list(token_ids)
        self.block_ids = list(block_ids)
        # async scheduling: drafts of its last batch that turned out wrong, which the
        # scheduler did not know yet when it made the next one
        self.num_rejected = 0


class ScriptedWorker:
    """Answers each step from `script(request_id, position)`, a token for each output position.

    draft   draft(request_id, position, num_drafts): what the worker itself would propose;
            used where the scheduler only says how many, which is -1 in the place of each
    """

    def __init__(
        self,
        block_size: int,
        script: Callable[[str, int], int],
        draft: Callable[[str, int, int], tuple[int, ...]],
    ) -> None:
        self.block_size = block_size
        self.requests: dict[str, _Known] = {}
        self._script = script
        self._draft = draft
        # (block, offset) -> which tokens' key is there, in the form of `names_of`
        self._memory: dict[tuple[int, int], int] = {}
        self._ran_last: set[str] = set()

    def execute(self, output: SchedulerOutput, is_overlapped: bool = False) -> ModelRunnerOutput:
        """Run a batch.

        is_overlapped   the batch before was not taken in when this one was scheduled
        """
        starts = self._update(output, is_overlapped)
        inputs = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            inputs[request_id] = self._write(
                request_id,
                starts[request_id],
                num_tokens,
                output.scheduled_spec_decode_tokens.get(request_id, ()),
            )
        sampled = {}
        for request_id, (names, drafts) in inputs.items():
            self._read(request_id, names)
            sampled[request_id] = self._sample(request_id, len(names), drafts)
        self._ran_last = set(sampled)
        # The order of rows is the worker's own affair.
        rows = list(reversed(sampled))
        return ModelRunnerOutput(
            step=output.step,
            time=output.time,
            req_ids=tuple(rows),
            sampled_token_ids=tuple(sampled[request_id] for request_id in rows),
        )

    def content(self, block_id: int) -> list[int | None]:
        """What is in each slot of a block, in the form of `names_of`."""
        return [self._memory.get((block_id, offset)) for offset in range(self.block_size)]

    def _update(self, output: SchedulerOutput, is_overlapped: bool) -> Mapping[str, int]:
        """Bring the books up to date; returns where each request of the batch starts."""
        starts = {}
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.requests, f"{new.req_id} is new a second time"
            self.requests[new.req_id] = _Known(new.prompt_token_ids, new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for row, request_id in enumerate(cached.req_ids):
            known = self.requests[request_id]
            groups = cached.new_block_ids[row]
            if request_id in cached.resumed_req_ids:
                known.block_ids = []
            known.block_ids += groups[0] if groups else ()
            start = cached.num_computed_tokens[row]
            if request_id in cached.all_token_ids:
                known.token_ids = list(cached.all_token_ids[request_id])
            elif is_overlapped and request_id in self._ran_last:
                start -= known.num_rejected
            starts[request_id] = start
            if not is_overlapped:
                num_outputs = len(known.token_ids) - known.num_prompt_tokens
                assert num_outputs == cached.num_output_tokens[row], "the books differ"
        assert set(starts) == set(output.num_scheduled_tokens)
        return starts

    def _write(
        self, request_id: str, start: int, num_tokens: int, drafts: tuple[int, ...]
    ) -> tuple[list[int], tuple[int, ...]]:
        """Put the batch's keys of one request into the cache.

        Returns a name for the tokens up to each position, and the drafts that ran.
        """
        known = self.requests[request_id]
        position = len(known.token_ids) - known.num_prompt_tokens
        if drafts and drafts[0] == -1:
            drafts = self._draft(request_id, position, len(drafts))
        end = start + num_tokens
        token_ids = [*known.token_ids, *drafts][:end]
        assert len(token_ids) == end, f"{request_id} is scheduled beyond its tokens"
        names = names_of(token_ids)
        size = self.block_size
        assert -(-end // size) <= len(known.block_ids), f"{request_id} has too few blocks"
        for index in range(start, end):
            self._memory[known.block_ids[index // size], index % size] = names[index]
        return names, drafts[: max(0, end - len(known.token_ids))]

    def _read(self, request_id: str, names: list[int]) -> None:
        """Check that each key the request attends to is there."""
        size, block_ids = self.block_size, self.requests[request_id].block_ids
        for index, name in enumerate(names):
            place = block_ids[index // size], index % size
            assert self._memory.get(place) == name, (
                f"{request_id} reads another key at position {index}, block {place[0]}"
            )

    def _sample(self, request_id: str, end: int, drafts: tuple[int, ...]) -> tuple[int, ...]:
        known = self.requests[request_id]
        known.num_rejected = 0
        if end < len(known.token_ids):
            return ()  # a prefill that is not finished
        position = len(known.token_ids) - known.num_prompt_tokens
        num_accepted = 0
        while (
            num_accepted < len(drafts)
            and self._script(request_id, position + num_accepted) == drafts[num_accepted]
        ):
            num_accepted += 1
        known.num_rejected = len(drafts) - num_accepted
        sampled = tuple(self._script(request_id, position + i) for i in range(num_accepted + 1))
        known.token_ids += sampled
        return sampled
