"""A tiny engine of its own: a scheduler and a pool in plain lists, which emit the stream.

It shares no code with the engine or with the readers, so that agreeing with it means
something. It is offered to tests as the fixture `tiny_engine`.
"""

from __future__ import annotations

import random

import pytest

from lmscope.boundary import (
    AllBlocksCleared,
    BlockAllocated,
    BlockFreed,
    BlockRemoved,
    BlockSnapshot,
    BlockStored,
    BlockTouched,
    CachedRequestData,
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    RequestOutput,
    RequestSnapshot,
    SchedulerOutput,
)
from lmscope.decisions import Behind, Code, Decision, Outcome
from lmscope.sampling_params import SamplingParams
from lmscope.tap import Tap


class TinyRequest:
    def __init__(self, request):
        self.request = request
        self.id = request.request_id
        self.tokens = list(request.prompt_token_ids)
        self.outputs = []
        self.text = ""
        self.status = "waiting"
        self.computed = 0
        self.lost = 0
        self.cached = -1
        self.preemptions = 0
        self.table = []
        self.num_stored = 0
        # the front end has ended it, and the engine hears of it before the next step
        self.is_told = False

    @property
    def order(self):
        return (self.request.priority, self.request.arrival_time, self.id)


class TinyEngine:
    """One method per thing that can happen; `snapshot` is the truth at any moment.

    `is_settled` is False while the engine has done something that no struct has told yet.
    """

    def __init__(
        self,
        *,
        num_blocks=14,
        block_size=4,
        max_num_seqs=4,
        budget=16,
        policy="fcfs",
        caching=True,
        seed=0,
        vocabulary=3,
    ):
        self.info = EngineInfo(
            model="tiny",
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=10_000,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
        )
        self.tap = Tap(self.info, self.snapshot)
        self.random = random.Random(seed)
        self.vocabulary = vocabulary
        self.step_number = 0
        self.clock = 100.0
        self.requests = {}
        self.running = []
        self.waiting = []
        self.free = list(range(1, num_blocks))
        self.owners = {i: [] for i in range(1, num_blocks)}
        self.content = {}  # block id -> (hash, stored by, step, tokens)
        self.events = []
        self.gone = []
        self.num_requests = 0

    # -- what can happen ---------------------------------------------------------

    def add(self, prompt="abcd", *, request_id=None, max_tokens=8, priority=0):
        self.num_requests += 1
        request = EngineCoreRequest(
            step=self.step_number,
            time=self.tick(),
            request_id=request_id or f"r{self.num_requests}",
            prompt_token_ids=tuple(map(ord, prompt)),
            sampling_params=SamplingParams(max_tokens=max_tokens, logprobs=1),
            arrival_time=self.clock,
            priority=priority,
            prompt=prompt,
            prompt_offsets=tuple(range(1, len(prompt) + 1)),
        )
        record = TinyRequest(request)
        self.requests[record.id] = record
        self.waiting.append(record)
        self.tap(request)
        return record.id

    def abort(self, request_id, *, tell=True):
        record = self.requests.get(request_id)
        if record is None:
            return
        self.release(record)
        self.drop(record)
        if tell:
            self.say(record, "", (), "abort")

    def reset(self, *, force=False):
        if force:
            for record in reversed(self.running):
                self.preempt(record)
            self.running = []
        if not any(self.owners.values()):
            self.content.clear()
            self.events.append(AllBlocksCleared())

    def step(self, *, abort_meanwhile=None, stop=None):
        """One whole step. `stop` names a request that a stop string ends in it."""
        for record in [r for r in self.requests.values() if r.is_told]:
            self.release(record)
            self.drop(record)
        output = self.schedule()
        self.tap(output)
        sampled = {}
        for request_id in output.num_scheduled_tokens:
            record = self.requests[request_id]
            is_done = record.computed == len(record.tokens)
            sampled[request_id] = (97 + self.random.randrange(self.vocabulary),) if is_done else ()
        self.tap(
            ModelRunnerOutput(
                step=self.step_number,
                time=self.tick(),
                req_ids=tuple(sampled),
                sampled_token_ids=tuple(sampled.values()),
            )
        )
        if abort_meanwhile in self.requests:
            self.release(self.requests[abort_meanwhile])
            self.drop(self.requests[abort_meanwhile])
        self.tap(self.update(sampled))
        for request_id, token_ids in sampled.items():
            record = self.told.get(request_id)
            if record is None or not token_ids:
                continue
            reason = "length" if len(record.outputs) >= self.max_tokens(record) else None
            if request_id == stop and reason is None:
                record.is_told = True
                self.say(record, "", token_ids, "stop", "END")
            else:
                self.say(record, chr(token_ids[0]), token_ids, reason)

    def run(self, limit=1000):
        while self.requests and limit:
            self.step()
            limit -= 1
        assert not self.requests, "the tiny engine does not come to an end"

    # -- a step --------------------------------------------------------------------

    def schedule(self):
        self.step_number += 1
        size, budget = self.info.block_size, self.info.max_num_batched_tokens
        granted, new_blocks, preempted, decisions = {}, {}, [], {}
        new, known = [], []

        def wait(record, code, other=None):
            decisions[record.id] = Decision(record.id, Outcome.WAITING, code, other_id=other)

        index = 0
        while index < len(self.running):
            record = self.running[index]
            if budget == 0:
                wait(record, Code.BUDGET)
                index += 1
                continue
            count = min(len(record.tokens) - record.computed, budget)
            needed = -(-(record.computed + count) // size) - len(record.table)
            while needed > len(self.free):
                victim = (
                    max(self.running, key=lambda r: r.order)
                    if self.info.scheduling_policy == "priority"
                    else self.running[-1]
                )
                place = self.running.index(victim)
                self.running.remove(victim)
                if victim.id in granted:
                    budget += granted.pop(victim.id)
                    del new_blocks[victim.id]
                if place < index:
                    index -= 1
                decisions[victim.id] = Decision(
                    victim.id,
                    Outcome.PREEMPTED,
                    Code.PREEMPTED_SELF if victim is record else Code.PREEMPTED,
                    blocks_needed=needed,
                    blocks_free=len(self.free),
                    other_id=record.id,
                    blocks_lost=len(victim.table),
                    tokens_lost=victim.computed,
                )
                self.preempt(victim)
                preempted.append(victim)
                if victim is record:
                    break
            if preempted and preempted[-1] is record:
                for rest in self.running[index:]:
                    wait(rest, Code.AFTER_SELF_PREEMPTION)
                break
            new_blocks[record.id] = self.take(record, needed)
            self.store(record, record.computed + count)
            granted[record.id] = count
            budget -= count
            decisions[record.id] = self.grant(record, count)
            index += 1

        behind = None
        if preempted:
            others = [r for r in self.queue() if r.id not in decisions]
            code, other = Code.AFTER_PREEMPTION, preempted[0].id
        else:
            others, code, other = [], Code.BEHIND, None
            queue = self.queue()
            for place, record in enumerate(queue):
                reason = None
                hits = self.find(record)
                count = min(len(record.tokens) - len(hits) * size, budget)
                held = sum(not self.owners[b] for b in hits)
                needed = -(-(len(hits) * size + count) // size) - len(hits)
                if budget == 0:
                    reason = Code.BUDGET
                elif len(self.running) == self.info.max_num_seqs:
                    reason = Code.SEATS
                elif needed + held > len(self.free):
                    reason = Code.NO_BLOCKS
                if reason is not None:
                    wait(record, reason)
                    others, other = queue[place + 1 :], record.id
                    break
                self.waiting.remove(record)
                self.running.append(record)
                for block in hits:
                    self.touch(record, block)
                self.take(record, needed)
                record.computed = len(hits) * size
                record.num_stored = len(hits)
                is_new = record.status == "waiting"
                (new if is_new else known).append(record)
                record.status = "running"
                if record.cached < 0:
                    record.cached = record.computed
                self.store(record, record.computed + count)
                granted[record.id] = count
                new_blocks[record.id] = tuple(record.table)
                budget -= count
                decisions[record.id] = self.grant(record, count, is_new=is_new, hits=len(hits))
        if others:
            behind = Behind(others[0].id, others[-1].id, len(others), code, other)

        resumed = known
        running = [r for r in self.running if r.id in granted and r not in new and r not in resumed]
        known = running + resumed
        output = SchedulerOutput(
            step=self.step_number,
            time=self.tick(),
            scheduled_new_reqs=tuple(
                NewRequestData(
                    r.id,
                    r.request.prompt_token_ids,
                    r.request.sampling_params,
                    (new_blocks[r.id],),
                    r.computed,
                )
                for r in new
            ),
            scheduled_cached_reqs=CachedRequestData(
                req_ids=tuple(r.id for r in known),
                resumed_req_ids=tuple(r.id for r in resumed),
                new_block_ids=tuple(
                    (new_blocks[r.id],) if new_blocks[r.id] else None for r in known
                ),
                num_computed_tokens=tuple(r.computed for r in known),
                num_output_tokens=tuple(len(r.outputs) for r in known),
            ),
            num_scheduled_tokens=granted,
            total_num_scheduled_tokens=sum(granted.values()),
            finished_req_ids=tuple(self.gone),
            preempted_req_ids=tuple(r.id for r in preempted),
            decisions=tuple(decisions.values()),
            behind=behind,
            kv_events=self.take_events(),
        )
        self.gone = []
        for request_id, count in granted.items():
            self.requests[request_id].computed += count
        return output

    def update(self, sampled):
        outputs = []
        self.told = dict(self.requests)
        for request_id, token_ids in sampled.items():
            record = self.requests.get(request_id)
            if record is None or not token_ids:
                continue
            record.tokens += token_ids
            record.outputs += token_ids
            reason = "length" if len(record.outputs) >= self.max_tokens(record) else None
            if reason:
                self.release(record)
                self.drop(record)
            logprobs = LogprobsLists(((token_ids[0], 97),), ((-0.5, -0.25),), (2,))
            outputs.append(EngineCoreOutput(request_id, token_ids, logprobs, finish_reason=reason))
        return EngineCoreOutputs(
            step=self.step_number,
            time=self.tick(),
            outputs=tuple(outputs),
            kv_events=self.take_events(),
        )

    # -- small parts ---------------------------------------------------------------

    def grant(self, record, count, *, is_new=True, hits=0):
        left = len(record.tokens) - record.computed - count
        if not is_new:
            code = Code.RESUMED
        elif record.computed >= len(record.request.prompt_token_ids):
            code = Code.DECODE
        else:
            code = Code.PREFILL_CHUNK if left else Code.PREFILL
        return Decision(
            record.id,
            Outcome.SCHEDULED,
            code,
            tokens_wanted=count + left,
            tokens_granted=count,
            tokens_left=left,
            tokens_cached=hits * self.info.block_size,
        )

    def say(self, record, text, token_ids, reason, stop_reason=None):
        record.text += text
        self.tap(
            RequestOutput(
                step=self.step_number,
                time=self.tick(),
                request_id=record.id,
                outputs=(
                    CompletionOutput(
                        0, text, token_ids, finish_reason=reason, stop_reason=stop_reason
                    ),
                ),
                finished=reason is not None,
            )
        )

    def queue(self):
        if self.info.scheduling_policy == "priority":
            return sorted(self.waiting, key=lambda r: r.order)
        return list(self.waiting)

    def take(self, record, count):
        blocks = []
        for _ in range(count):
            block = self.free.pop(0)
            if block in self.content:
                block_hash = self.content.pop(block)[0]
                self.events.append(BlockRemoved(block, block_hash, record.id))
            self.owners[block] = [record.id]
            self.events.append(BlockAllocated(block, record.id))
            record.table.append(block)
            blocks.append(block)
        return tuple(blocks)

    def touch(self, record, block):
        if not self.owners[block]:
            self.free.remove(block)
        self.owners[block].append(record.id)
        record.table.append(block)
        _, stored_by, step, _ = self.content[block]
        self.events.append(BlockTouched(block, record.id, stored_by, step))

    def hash_of(self, tokens):
        return hash(tuple(tokens)) & (2**64 - 1)

    def find(self, record):
        if not self.info.enable_prefix_caching:
            return []
        size, hits = self.info.block_size, []
        for end in range(size, len(record.tokens), size):
            wanted = self.hash_of(record.tokens[:end])
            block = next((b for b, c in self.content.items() if c[0] == wanted), None)
            if block is None:
                break
            hits.append(block)
        return hits

    def store(self, record, end):
        size = self.info.block_size
        if not self.info.enable_prefix_caching:
            return
        for index in range(record.num_stored, min(end, len(record.tokens)) // size):
            block = record.table[index]
            tokens = tuple(record.tokens[index * size : (index + 1) * size])
            block_hash = self.hash_of(record.tokens[: (index + 1) * size])
            parent = self.hash_of(record.tokens[: index * size]) if index else None
            self.content[block] = (block_hash, record.id, self.step_number, tokens)
            self.events.append(BlockStored(block, record.id, block_hash, parent, tokens, index))
            record.num_stored = index + 1

    def release(self, record):
        for block in reversed(record.table):
            self.owners[block].remove(record.id)
            if not self.owners[block]:
                self.free.append(block)
            self.events.append(BlockFreed(block, record.id))
        record.table = []
        record.num_stored = 0

    def drop(self, record):
        del self.requests[record.id]
        self.running = [r for r in self.running if r is not record]
        self.waiting = [r for r in self.waiting if r is not record]
        self.gone.append(record.id)

    def preempt(self, record):
        self.release(record)
        record.status = "preempted"
        record.lost = max(record.lost, record.computed)
        record.computed = 0
        record.preemptions += 1
        self.waiting.insert(0, record)

    def max_tokens(self, record):
        return record.request.sampling_params.max_tokens

    def tick(self):
        self.clock += 0.001
        return self.clock

    def take_events(self):
        events, self.events = tuple(self.events), []
        return events

    # -- the truth -------------------------------------------------------------------

    @property
    def is_settled(self):
        return not self.events and not self.gone

    def snapshot(self):
        return EngineSnapshot(
            info=self.info,
            step=self.step_number,
            time=self.clock,
            blocks=tuple(
                BlockSnapshot(
                    block,
                    tuple(self.owners[block]),
                    *self.content.get(block, ()),
                    stored_order=1 + list(self.content).index(block)
                    if block in self.content
                    else 0,
                )
                for block in sorted(self.owners)
                if self.owners[block] or block in self.content
            ),
            free_queue=tuple(self.free),
            requests=tuple(
                RequestSnapshot(
                    request=r.request,
                    status=r.status,
                    output_token_ids=tuple(r.outputs),
                    text=r.text,
                    num_computed_tokens=r.computed,
                    num_cached_tokens=r.cached,
                    block_ids=tuple(r.table),
                    num_preemptions=r.preemptions,
                    num_tokens_lost=r.lost if r.computed < r.lost else 0,
                )
                for r in (*self.running, *self.queue())
            ),
        )


class RandomLife:
    """Random operations on a tiny engine: arrivals with shared prefixes, steps, trouble."""

    def __init__(self, engine, seed):
        self.engine = engine
        self.random = random.Random(seed)

    def act(self):
        engine, rng = self.engine, self.random
        live = list(engine.requests)
        kind = rng.random()
        if kind < 0.25 and len(live) < 12:
            capacity = (engine.info.num_blocks - 1) * engine.info.block_size
            prompt = ("abcabcabbaacccab" * 2)[: rng.randrange(1, 20)]
            prompt += "".join(rng.choice("abc") for _ in range(rng.randrange(0, 6)))
            # What can never fit would be preempted for ever.
            max_tokens = rng.randrange(1, max(2, min(14, capacity - len(prompt))))
            reused = rng.random() < 0.1 and [f"r{n}" for n in range(1, engine.num_requests)]
            again = [i for i in reused or () if i not in engine.requests]
            engine.add(
                prompt,
                request_id=rng.choice(again) if again else None,
                max_tokens=max_tokens,
                priority=rng.randrange(3),
            )
        elif kind < 0.32 and live:
            engine.abort(rng.choice(live), tell=rng.random() < 0.5)
        elif kind < 0.34:
            engine.reset(force=rng.random() < 0.5)
        else:
            engine.step(
                abort_meanwhile=rng.choice(live) if live and rng.random() < 0.05 else None,
                stop=rng.choice(live) if live and rng.random() < 0.1 else None,
            )


@pytest.fixture(scope="session")
def tiny_engine():
    """Makes a TinyEngine; the keywords are its settings."""
    return TinyEngine


@pytest.fixture(scope="session")
def random_life():
    """Makes a RandomLife of an engine and a seed."""
    return RandomLife


@pytest.fixture
def busy_stream(tiny_engine):
    """The stream of a run with hits, evictions and preemptions: (snapshot, structs, engine)."""
    engine = tiny_engine(num_blocks=11, seed=3)
    structs = []
    snapshot, subscription = engine.tap.follow(structs.append)
    for count in range(12):
        engine.add("abcabcab" + "cab"[: count % 4], max_tokens=9)
        engine.step()
    engine.run()
    engine.step()
    subscription.close()
    return snapshot, structs, engine
