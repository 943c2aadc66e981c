"""Step: what one call of schedule() has collected so far, and the reasons it has given."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lmscope.boundary import CachedRequestData, NewRequestData
from lmscope.decisions import Behind, Code, Decision, Outcome
from lmscope.engine.request import Request

__all__ = ["DecodeRow", "Step"]


# Neighbours in the running list that got one token each; the token budget when the first of
# them was examined; what was decided about each.
DecodeRow = tuple[list[Request], int, list[Decision]]

# To name a member of an enumeration takes longer than to make a decision with it.
_SCHEDULED, _DECODE = Outcome.SCHEDULED, Code.DECODE


class Step:
    """Who gets how many tokens in which new blocks, and why; the scheduler fills it.

    Requests stand in the order in which schedule() came to them.

    row_before   `first_row` of the step before
    """

    def __init__(self, token_budget: int, row_before: DecodeRow | None = None) -> None:
        self.token_budget = token_budget
        self.first_row: DecodeRow | None = None
        self._row_before = row_before
        self.num_scheduled_tokens: dict[str, int] = {}
        self.spec_decode_tokens: dict[str, tuple[int, ...]] = {}
        # those that got blocks; of an admitted request all that it holds, hits first
        self.new_blocks: dict[str, tuple[int, ...]] = {}
        self.running: list[Request] = []
        self.new: list[Request] = []
        self.resumed: list[Request] = []
        self.preempted: list[Request] = []
        # the scheduled ones once more: those that decode a token, and all others
        self.decodes: list[Request] = []
        self.others: list[Request] = []
        # in the order in which requests were examined
        self.decisions: list[Decision] = []
        self.behind: Behind | None = None

    # -- what is granted -----------------------------------------------------

    def grant(self, request: Request, num_tokens: int, blocks: Sequence[int]) -> None:
        """Give a request tokens and blocks, after the decision about it."""
        request_id = request.request_id
        self.others.append(request)
        self.num_scheduled_tokens[request_id] = num_tokens
        if blocks:
            self.new_blocks[request_id] = tuple(blocks)
        self.token_budget -= num_tokens

    def grant_decodes(self, requests: list[Request]) -> None:
        """Give a row of running requests a token each; their blocks are in `new_blocks`."""
        self.decide_decodes(requests)
        self.running += requests
        self.decodes += requests
        self.num_scheduled_tokens.update(dict.fromkeys([r.request_id for r in requests], 1))
        self.token_budget -= len(requests)

    def take_back(self, request: Request) -> None:
        """Undo what a victim got earlier in the same step."""
        request_id = request.request_id
        self.running.remove(request)
        (self.decodes if request in self.decodes else self.others).remove(request)
        self.token_budget += self.num_scheduled_tokens.pop(request_id)
        self.spec_decode_tokens.pop(request_id, None)
        self.new_blocks.pop(request_id, None)

    # -- why -----------------------------------------------------------------

    def decide(self, decision: Decision, request: Request, was_examined: bool = False) -> None:
        """Write down what is decided about a request.

        was_examined   in this step already, as a victim may have been; the last word counts
        """
        if was_examined:
            assert request.decision is not None
            self.decisions[self.decisions.index(request.decision)] = decision
        else:
            self.decisions.append(decision)
        request.decision = decision

    def decide_decodes(self, requests: list[Request]) -> None:
        """Write down that running requests compute one token each, and nothing is left.

        While nobody in a row leaves, it has its decisions from the step before.
        """
        budget_left = self.token_budget
        decisions: list[Decision] = []
        if self._row_before is not None:
            requests_before, budget_before, decisions_before = self._row_before
            num_before = len(requests_before)
            if budget_before == budget_left and requests[:num_before] == requests_before:
                decisions = decisions_before[:]
                budget_left -= num_before
        for request in requests[len(decisions) :]:
            request.decision = decision = Decision(
                request.request_id,
                _SCHEDULED,
                _DECODE,
                tokens_wanted=1,
                tokens_granted=1,
                budget_left=budget_left,
            )
            decisions.append(decision)
            budget_left -= 1
        if self.first_row is None:
            self.first_row = requests, self.token_budget, decisions
        self.decisions += decisions

    def decide_granted(
        self,
        request: Request,
        wanted: int,
        num_tokens: int,
        num_hits: int = 0,
        is_resumed: bool = False,
    ) -> None:
        """Write down why a request runs and what it computes; before its counters advance."""
        computed = request.num_computed_tokens
        recomputed = max(0, min(request.num_tokens_lost, computed + num_tokens) - computed)
        left = max(0, wanted - num_tokens)
        if is_resumed or recomputed:
            code = Code.RESUMED
        elif computed >= request.num_prompt_tokens:
            code = Code.DECODE
        elif left:
            code = Code.PREFILL_CHUNK
        else:
            code = Code.PREFILL
        decision = Decision(
            request.request_id,
            _SCHEDULED,
            code,
            tokens_wanted=wanted,
            tokens_granted=num_tokens,
            tokens_left=left,
            tokens_recomputed=recomputed,
            tokens_cached=num_hits,
            budget_left=self.token_budget,
        )
        self.decide(decision, request)

    # -- as columns ------------------------------------------------------------

    def new_requests(self) -> tuple[NewRequestData, ...]:
        """What the worker must know of requests that are scheduled for the first time."""
        return tuple(
            NewRequestData(
                r.request_id,
                r.core_request.prompt_token_ids,
                r.sampling_params,
                (self.new_blocks[r.request_id],),
                r.num_computed_tokens,
            )
            for r in self.new
        )

    def cached_requests(self, scheduled_before: Collection[str]) -> CachedRequestData:
        """What is new about requests that the worker knows.

        scheduled_before   ids of the previous step; what others have is sent as a whole
        """
        known = self.running + self.resumed
        # Lists inside, since a tuple takes them in one go; there are many rows.
        req_ids = [r.request_id for r in known]
        new_blocks = self.new_blocks
        return CachedRequestData(
            req_ids=tuple(req_ids),
            resumed_req_ids=tuple([r.request_id for r in self.resumed]),
            all_token_ids={
                r.request_id: tuple(r.all_token_ids)
                for r in known
                if r.request_id not in scheduled_before
            },
            new_block_ids=tuple([(new_blocks[i],) if i in new_blocks else None for i in req_ids]),
            num_computed_tokens=tuple([r.num_computed_tokens for r in known]),
            num_output_tokens=tuple(
                [
                    len(r.all_token_ids) - r.num_prompt_tokens + r.num_output_placeholders
                    for r in known
                ]
            ),
        )
