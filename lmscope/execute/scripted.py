"""ScriptedExecutor: a model that says what a function tells it to. No torch, no weights.

Everything around it is the real engine, so tests and tutorials can make any scheduling
situation happen and know each token in advance.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lmscope.boundary import ModelRunnerOutput, SchedulerOutput

__all__ = ["ScriptedExecutor"]


class ScriptedExecutor:
    """Answers each step from `script(request_id, position)`.

    position   0 for the first output token of a request, then 1, 2, ...
    script     returns a token id, or None for `eos_token_id`
    """

    def __init__(self, script: Callable[[str, int], int | None], eos_token_id: int) -> None:
        self._script = script
        self._eos_token_id = eos_token_id
        self._num_prompt_tokens: dict[str, int] = {}
        self._pending: ModelRunnerOutput | None = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Work out the answer; `sample_tokens` hands it over."""
        for request_id in scheduler_output.finished_req_ids:
            self._num_prompt_tokens.pop(request_id, None)
        known: dict[str, tuple[int, int]] = {}  # id -> computed before, outputs so far
        for new in scheduler_output.scheduled_new_reqs:
            self._num_prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            known[new.req_id] = (new.num_computed_tokens, 0)
        cached = scheduler_output.scheduled_cached_reqs
        for row, request_id in enumerate(cached.req_ids):
            known[request_id] = (cached.num_computed_tokens[row], cached.num_output_tokens[row])

        sampled: list[tuple[int, ...]] = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            computed, position = known[request_id]
            num_known = self._num_prompt_tokens[request_id] + position
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
        self._num_prompt_tokens.clear()

    def _token(self, request_id: str, position: int) -> int:
        token_id = self._script(request_id, position)
        return self._eos_token_id if token_id is None else token_id
