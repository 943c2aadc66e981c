"""Where tokens come from, by brute force; and workloads of an engine to ask it about.

The oracle keeps every prompt, every output and every content that a block ever had as plain
tuples of tokens, and compares them one by one. It knows no hash, no index and no tree, and it
works out by itself what each look-up must find; the hits in the stream are not believed.
"""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from zlib import crc32

from lmscope.boundary import (
    AllBlocksCleared,
    BlockAllocated,
    BlockRemoved,
    BlockStored,
    BlockTouched,
    CompletionOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.config import EngineConfig
from lmscope.engine.core import EngineCore
from lmscope.execute.scripted import ScriptedExecutor
from lmscope.sampling_params import SamplingParams
from lmscope.tap import Tap

__all__ = ["Lab", "Oracle"]

# Token n is written as the n-th of these; the last is a part of a character and adds nothing.
LETTERS = ("a", "b", "<i>", "\n", "")


def token_at(request_id, position):
    """What the model says: the same in each run."""
    return crc32(f"{request_id} {position}".encode()) % len(LETTERS)


class Oracle:
    """Listens to a stream from its beginning; `admissions` has the answers by request id."""

    def __init__(self, info):
        self.info = info
        self.size = info.block_size
        self.admissions = {}
        self.requests = {}
        self.tokens = {}
        # every content that a block ever had, in the order of storing
        self.contents = []
        # (id, tokens, salt, whose) of prompts, and again with their output when it has ended
        self.earlier = []
        self.live = {}
        self.step = 0

    def __call__(self, boundary):
        self.step = max(self.step, boundary.step)
        if isinstance(boundary, EngineCoreRequest):
            request_id = boundary.request_id
            self.requests[request_id] = boundary
            self.tokens[request_id] = boundary.prompt_token_ids
            self.admissions[request_id] = []
            self.live[request_id] = True
        elif isinstance(boundary, SchedulerOutput):
            self.schedule(boundary)
        elif isinstance(boundary, EngineCoreOutputs):
            for output in boundary.outputs:
                self.tokens[output.request_id] += output.new_token_ids
            for event in boundary.kv_events:
                self.happen(event)
            for output in boundary.outputs:
                if output.finish_reason is not None:
                    self.end(output.request_id)

    def abort(self, request_id):
        self.end(request_id)

    def end(self, request_id):
        if self.live.pop(request_id, None) and self.admissions[request_id]:
            self.earlier.append(self.entry(request_id))

    def entry(self, request_id):
        request = self.requests[request_id]
        return (request_id, self.tokens[request_id], request.cache_salt, request)

    def schedule(self, output):
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        to_come = {new.req_id: "new" for new in output.scheduled_new_reqs}
        to_come.update(dict.fromkeys(resumed, "resumed"))
        for event in output.kv_events:
            taker = getattr(event, "for_request_id", getattr(event, "request_id", None))
            if taker in to_come and isinstance(event, BlockTouched | BlockAllocated | BlockRemoved):
                self.admit(taker, to_come.pop(taker))
            self.happen(event)
        assert not to_come, "somebody was admitted without a block"
        for request_id, count in output.num_scheduled_tokens.items():
            admission = self.admissions[request_id][-1]
            start = admission.computed
            admission.computed += count
            end = min(admission.computed, admission.num_tokens)
            if start < end:
                admission.chunks.append((start, end, output.step))

    def happen(self, event):
        if isinstance(event, BlockStored):
            request = self.requests[event.request_id]
            prefix = self.tokens[event.request_id][: (event.index + 1) * self.size]
            assert prefix[-self.size :] == event.token_ids
            self.contents.append(
                SimpleNamespace(
                    block=event.block_id,
                    salt=request.cache_salt,
                    prefix=prefix,
                    by=event.request_id,
                    step=self.step,
                    gone=None,
                    rank=-1,
                )
            )
        elif isinstance(event, BlockRemoved):
            self.lose("evicted", event.for_request_id, event.block_id)
        elif isinstance(event, AllBlocksCleared):
            self.lose("cleared", None)

    def lose(self, how, taker, block=None):
        """One block, or all of them in the same moment, lose what they have."""
        rank = sum(content.gone is not None for content in self.contents)
        for content in self.contents:
            if content.gone is None and block in (None, content.block):
                content.gone, content.rank = (how, self.step, taker), rank

    def admit(self, request_id, kind):
        request, tokens = self.requests[request_id], self.tokens[request_id]
        hits = []
        if not self.is_skipped(request):
            while (len(hits) + 1) * self.size < len(tokens):
                found = self.find(tokens[: (len(hits) + 1) * self.size], request.cache_salt)
                alive = [content for content in found if content.gone is None]
                if not alive:
                    break
                hits.append((alive[0].block, alive[0].by, alive[0].step))
        self.admissions[request_id].append(
            SimpleNamespace(
                kind=kind,
                step=self.step,
                num_tokens=len(tokens),
                hits=hits,
                computed=len(hits) * self.size,
                chunks=[],
                miss=self.miss(request, tokens, len(hits) * self.size),
                match=self.match(request, tokens),
            )
        )
        if kind == "new":
            self.earlier.append(self.entry(request_id))

    def is_skipped(self, request):
        return not self.info.enable_prefix_caching or bool(
            request.sampling_params.skip_reading_prefix_cache
        )

    def find(self, prefix, salt):
        return [c for c in self.contents if c.salt == salt and c.prefix == prefix]

    def miss(self, request, tokens, position):
        """(code, block, stored by, stored step, removed step, for whom, detail)"""
        if not self.info.enable_prefix_caching:
            return "lookup_skipped", None, None, 0, 0, None, "caching is off"
        if request.sampling_params.skip_reading_prefix_cache:
            logprobs = request.sampling_params.prompt_logprobs is not None
            detail = "prompt_logprobs" if logprobs else "skip_reading_prefix_cache"
            return "lookup_skipped", None, None, 0, 0, None, detail
        prefix = tokens[: position + self.size]
        if len(prefix) < position + self.size:
            return "shorter_than_block", None, None, 0, 0, None, ""
        # Of several the one lost last; of several lost at once the oldest, which was hit.
        mine = self.find(prefix, request.cache_salt)
        for content in mine:
            if content.gone is None:
                return self.told("tail_recompute", content)
        if mine:
            last = max(mine, key=lambda content: content.rank)
            return self.told(last.gone[0], last)
        others = [c for c in self.contents if c.prefix == prefix]
        if others:
            alive = [content for content in others if content.gone is None]
            last = max(others, key=lambda content: content.rank)
            return self.told("other_salt", alive[0] if alive else last)
        return "never_seen", None, None, 0, 0, None, ""

    def told(self, code, content):
        removed_step, taker = content.gone[1:] if content.gone else (0, None)
        return code, content.block, content.by, content.step, removed_step, taker, ""

    def match(self, request, tokens):
        """(id, equal tokens, token here, token there, under another salt) of the best"""
        best, num_equal = None, 0
        for other in self.earlier:
            same = 0
            while same < min(len(tokens), len(other[1])) and tokens[same] == other[1][same]:
                same += 1
            if other[3] is not request and same > num_equal:
                best, num_equal = other, same
        if best is None:
            return None
        known = [other[1] for other in self.earlier if other[3] is best[3]][-1]
        here = tokens[num_equal] if num_equal < len(tokens) else None
        there = known[num_equal] if num_equal < len(known) else None
        return best[0], num_equal, here, there, best[2] != request.cache_salt


class Lab:
    """An engine without a model that lives a random life; `oracle` hears all of it."""

    def __init__(self, seed):
        self.random = rng = random.Random(seed)
        self.is_async = rng.random() < 0.25
        size = rng.choice([1, 2, 3, 4, 8])
        self.max_model_len = 64
        budget = rng.choice([8, 16, 40, 100])
        config = EngineConfig(
            model="scripted", dtype="float32", device="cpu", seed=0, threads=1,
            engine="thread", execute="scripted", kv_block_bytes=0,
            block_size=size,
            num_kv_blocks=1 + -(-self.max_model_len // size) + rng.randrange(0, 24),
            max_model_len=self.max_model_len,
            max_num_seqs=rng.choice([1, 2, 3, 5, 8]),
            max_num_batched_tokens=budget,
            enable_prefix_caching=rng.random() < 0.95,
            enable_chunked_prefill=budget < self.max_model_len or rng.random() < 0.7,
            long_prefill_token_threshold=rng.choice([0, 0, 0, 5]),
            scheduling_policy=rng.choice(["fcfs", "fcfs", "priority"]),
            async_scheduling=self.is_async,
        )  # fmt: skip
        self.info = EngineInfo(
            model="scripted",
            block_size=size,
            num_blocks=config.num_kv_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.scheduling_policy,
        )
        self.tap = Tap(self.info, self.snapshot)
        self.executor = ScriptedExecutor(token_at, 0)
        self.core = EngineCore(config, self.executor, self.tap)
        self.oracle = Oracle(self.info)
        self.tap.follow(self.oracle, strict=True)
        self.prompts = [self.draw(rng.randrange(8, 50)) for _ in range(3)]
        self.num_requests = 0
        self.batches = deque()

    def live(self, num_requests, is_over=True):
        """Until so many requests have come, and if it `is_over` have ended."""
        while self.num_requests < num_requests or (
            is_over and (self.core.has_work() or self.batches)
        ):
            kind = self.random.random()
            live = list(self.core.scheduler.requests)
            if kind < 0.4 and self.num_requests < num_requests and len(live) < 12:
                self.add()
            elif kind < 0.43 and live:
                request_id = self.random.choice(live)
                self.core.abort_requests([request_id])
                self.oracle.abort(request_id)
            elif kind < 0.45:
                # Two batches in flight and a forced preemption lose tokens, as in vLLM 0.16.
                self.core.reset_prefix_cache(self.random.random() < 0.5 and not self.is_async)
            elif self.core.has_work() or self.batches:
                self.step()

    def add(self):
        rng = self.random
        prompt = rng.choice(self.prompts)[: rng.randrange(1, 50)] + self.draw(rng.choice([0, 1, 9]))
        tokens = self.oracle.tokens
        if tokens and rng.random() < 0.3:  # the next turn of a conversation
            prompt = tokens[rng.choice(list(tokens))] + self.draw(rng.randrange(4))
        prompt = prompt[: self.max_model_len - 1]
        text = [LETTERS[token_id] for token_id in prompt]
        ended = [i for i in tokens if i not in self.core.scheduler.requests]
        is_again = ended and rng.random() < 0.05
        self.core.add_request(
            EngineCoreRequest(
                request_id=rng.choice(ended) if is_again else f"r{self.num_requests}",
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(
                    temperature=0.0,
                    max_tokens=min(rng.randrange(1, 14), self.max_model_len - len(prompt)),
                    ignore_eos=True,
                    prompt_logprobs=rng.choice([None] * 15 + [0]),
                    skip_reading_prefix_cache=rng.choice([None] * 15 + [True]),
                ),
                arrival_time=float(self.num_requests),
                cache_salt=rng.choice([None, None, None, "x", "y"]),
                priority=rng.randrange(3),
                prompt="".join(text),
                prompt_offsets=tuple(len("".join(text[: i + 1])) for i in range(len(text))),
            )
        )
        self.num_requests += 1

    def draw(self, count):
        return tuple(self.random.choice((0, 0, 0, 0, 1, 2, 3, 4)) for _ in range(count))

    def step(self):
        core, scheduler = self.core, self.core.scheduler
        if core.has_work():
            core._pool.record_events = True
            output = scheduler.schedule()
            self.tap(output)
            self.executor.execute_model(output)
            self.batches.append((output, self.executor.sample_tokens()))
            if self.is_async and len(self.batches) < 2 and self.random.random() < 0.7:
                return
        output, answer = self.batches.popleft()
        self.tap(answer)
        outputs = scheduler.update_from_output(output, answer)
        self.tap(outputs)
        for each in outputs.outputs:
            text = "".join(LETTERS[token_id] for token_id in each.new_token_ids)
            completion = CompletionOutput(0, text, each.new_token_ids)
            self.tap(
                RequestOutput(
                    step=outputs.step,
                    time=outputs.time,
                    request_id=each.request_id,
                    outputs=(completion,),
                    finished=each.finish_reason is not None,
                )
            )

    def snapshot(self):
        blocks, free_queue = self.core.snapshot_blocks()
        return EngineSnapshot(
            info=self.info,
            step=self.core.step_number,
            blocks=blocks,
            free_queue=free_queue,
            requests=self.core.snapshot_requests(lambda request_id: ""),
        )
