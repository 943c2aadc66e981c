"""ScriptedExecutor: a model that says what a function tells it to. No torch, no weights.

Everything around it is the real engine, so tests and tutorials can make any scheduling
situation happen and know each token in advance.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lmscope.boundary import ModelRunnerOutput, NewRequestData, SchedulerOutput

__all__ = ["ScriptedExecutor"]


class ScriptedExecutor:
    """Answers each step from `script(request_id, position)`.

    position   0 for the first output token of a request, then 1, 2, ...
    script     returns a token id, or None for `eos_token_id`

    With async scheduling a request may be run once more before the engine knows that it is
    over. Behind a token that ends it the script is not asked; behind the end of a stop string,
    or an abort, it is, for one position, and what it returns is dropped.
    """

    def __init__(self, script: Callable[[str, int], int | None], eos_token_id: int) -> None:
        self._script = script
        self._eos_token_id = eos_token_id
        self._known: dict[str, NewRequestData] = {}
        # the position of the token that ends a request, of those that have had it
        self._ends: dict[str, int] = {}
        self._pending: ModelRunnerOutput | None = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Work out the answer; `sample_tokens` hands it over."""
        for request_id in scheduler_output.finished_req_ids:
            self._known.pop(request_id, None)
            self._ends.pop(request_id, None)
        known: dict[str, tuple[int, int]] = {}  # id -> computed before, outputs so far
        for new in scheduler_output.scheduled_new_reqs:
            self._known[new.req_id] = new
            known[new.req_id] = (new.num_computed_tokens, 0)
        cached = scheduler_output.scheduled_cached_reqs
        for row, request_id in enumerate(cached.req_ids):
            known[request_id] = (cached.num_computed_tokens[row], cached.num_output_tokens[row])

        sampled: list[tuple[int, ...]] = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            computed, position = known[request_id]
            num_known = len(self._known[request_id].prompt_token_ids) + position
            if computed + num_tokens < num_known:
                sampled.append(())  # a prefill that is not finished
            else:
                sampled.append((self._token(request_id, position),))
        self._pending = ModelRunnerOutput(
            step=scheduler_output.step,
            time=time.monotonic(),
            req_ids=tuple(scheduler_output.num_scheduled_tokens),
            sampled_token_ids=tuple(sampled),
        )

    def sample_tokens(self) -> ModelRunnerOutput:
        pending, self._pending = self._pending, None
        assert pending is not None, "sample_tokens needs an execute_model before it"
        return pending

    def shutdown(self) -> None:
        self._known.clear()
        self._ends.clear()

    def _token(self, request_id: str, position: int) -> int:
        if position > self._ends.get(request_id, position):
            return self._eos_token_id
        token_id = self._script(request_id, position)
        if token_id is None:
            token_id = self._eos_token_id
        params = self._known[request_id].sampling_params
        is_eos = token_id == self._eos_token_id and not params.ignore_eos
        if position + 1 >= params.min_tokens and (is_eos or token_id in params.stop_token_ids):
            self._ends[request_id] = position
        return token_id
