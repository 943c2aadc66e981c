"""EngineView against a tiny engine of its own, after every struct."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from lmscope.boundary import (
    AllBlocksCleared,
    BlockAllocated,
    BlockFreed,
    BlockRemoved,
    BlockStored,
    BlockTouched,
    CachedRequestData,
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    NewRequestData,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.decisions import Code
from lmscope.sampling_params import SamplingParams
from lmscope.scope.view import EngineView, differences


def make_view(num_blocks=8, block_size=4, **options):
    info = EngineInfo(
        model="m",
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    snapshot = EngineSnapshot(info=info, free_queue=tuple(range(1, num_blocks)))
    return EngineView(snapshot, **options)


def request(request_id, prompt="abcdef", step=0, **options):
    return EngineCoreRequest(
        step=step,
        request_id=request_id,
        prompt_token_ids=tuple(map(ord, prompt)),
        sampling_params=SamplingParams(max_tokens=8),
        prompt=prompt,
        prompt_offsets=tuple(range(1, len(prompt) + 1)),
        **options,
    )


def admit(request_id, blocks, num_tokens, step=1, computed=0, events=(), prompt="abcdef", **more):
    new = NewRequestData(
        request_id, tuple(map(ord, prompt)), SamplingParams(), (tuple(blocks),), computed
    )
    allocated = tuple(BlockAllocated(block, request_id) for block in blocks)
    return SchedulerOutput(
        step=step,
        scheduled_new_reqs=(new,),
        num_scheduled_tokens={request_id: num_tokens},
        total_num_scheduled_tokens=num_tokens,
        kv_events=(*(events or allocated),),
        **more,
    )


def follow(engine, **options):
    """A view that follows an engine from now on."""
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot, **options)
    return view


def assert_counts_add_up(view):
    """What the view counts as it goes, against counting all of it again."""
    states = [block.state for block in view.blocks]
    assert view.num_used == states.count("in_use")
    assert view.num_kept == states.count("kept")
    assert view.num_empty == states.count("empty")
    assert view.num_shared == sum(block.ref_cnt > 1 for block in view.blocks)
    size = view.info.block_size
    for request_id in (*view.running, *view.waiting):
        request = view.requests[request_id]
        blocks = [view.blocks[i] for i in request.block_ids]
        assert all(request_id in block.owners for block in blocks)
        assert request.num_shared_blocks == sum(block.ref_cnt > 1 for block in blocks)
        assert [block.index for block in blocks] == list(range(len(blocks)))
        assert sum(block.num_filled for block in blocks) == request.num_computed_tokens
        assert request.max_blocks >= len(blocks)
        for block in blocks:
            text = "".join(request.token_texts())[block.index * size :][: block.num_filled]
            assert view.block_text(block.block_id) == text
    for block in view.blocks.not_empty():
        if block.block_hash is not None:
            assert block.num_filled == size
            # a stop string takes the text of its token away
            whole = "".join(map(chr, block.token_ids))
            assert whole.startswith(view.block_text(block.block_id))


# -- against the tiny engine ---------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_the_fold_equals_the_engine_after_every_struct(
    tiny_engine, random_life, policy, caching, seed
):
    engine = tiny_engine(policy=policy, caching=caching, seed=seed, num_blocks=9 + seed)
    life = random_life(engine, seed)
    checked = []

    def fold(boundary):
        view.apply(boundary)
        if engine.is_settled:
            assert differences(view, engine.snapshot()) == []
            checked.append(boundary)
        if isinstance(boundary, EngineCoreOutputs) and engine.is_settled:
            assert_counts_add_up(view)

    snapshot, _ = engine.tap.follow(fold, strict=True)
    view = EngineView(snapshot)
    for _ in range(250):
        life.act()
    engine.run()
    engine.step()

    assert differences(view, engine.snapshot()) == []
    assert len(checked) > 300
    assert view.num_used == 0
    assert view.num_running == view.num_waiting == 0
    assert view.totals.preemptions > 0
    assert all(r.status == "finished" for r in view.requests.values())


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(["fcfs", "priority"]), data=st.data())
def test_any_life_is_folded_right(tiny_engine, random_life, seed, policy, data):
    engine = tiny_engine(
        policy=policy,
        seed=seed,
        num_blocks=data.draw(st.integers(7, 16)),
        block_size=data.draw(st.sampled_from([1, 2, 4, 16])),
        budget=data.draw(st.integers(1, 24)),
        max_num_seqs=data.draw(st.integers(1, 5)),
    )
    life = random_life(engine, seed)
    view = follow(engine)
    for _ in range(80):
        life.act()
        if engine.is_settled:
            assert differences(view, engine.snapshot()) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_that_joins_late_comes_to_the_same_picture(tiny_engine, random_life, seed):
    engine = tiny_engine(seed=seed)
    life = random_life(engine, seed)
    late = []
    for place in range(200):
        life.act()
        if place % 40 == 20 and engine.is_settled:
            late.append(follow(engine))
    engine.run()
    engine.step()

    assert late
    for view in late:
        assert differences(view, engine.snapshot()) == []


def test_a_snapshot_of_the_view_continues_like_the_view(busy_stream):
    snapshot, structs, _ = busy_stream
    view = EngineView(snapshot)
    for place, boundary in enumerate(structs):
        view.apply(boundary)
        if place == len(structs) // 2:
            second = EngineView(view.snapshot())
        elif place > len(structs) // 2:
            second.apply(boundary)
            assert differences(second, view.snapshot()) == []


def test_a_copy_stays_while_the_original_goes_on(busy_stream):
    snapshot, structs, _ = busy_stream
    view = EngineView(snapshot)
    copies = []
    for boundary in structs:
        view.apply(boundary)
        copies.append((view.copy(), view.snapshot(), view.decisions, view.this_step.scheduled))

    for copy, then, decisions, scheduled in copies:
        assert differences(copy, then) == []
        assert copy.decisions == decisions
        assert copy.this_step.scheduled == scheduled


def test_a_copy_can_go_its_own_way(busy_stream):
    snapshot, structs, _ = busy_stream
    view = EngineView(snapshot)
    half = len(structs) // 2
    for boundary in structs[:half]:
        view.apply(boundary)
    before = view.snapshot()
    copy = view.copy()
    for boundary in structs[half:]:
        copy.apply(boundary)

    assert differences(view, before) == []
    assert copy.totals.finished > view.totals.finished


# -- what it says of blocks ----------------------------------------------------------------


def test_blocks_say_their_state_and_who_holds_them():
    view = make_view()
    view.apply(request("a"))
    view.apply(
        admit(
            "a",
            [1, 2],
            6,
            events=(
                BlockAllocated(1, "a"),
                BlockAllocated(2, "a"),
                BlockStored(1, "a", 77, None, (97, 98, 99, 100), 0),
            ),
        )
    )

    assert [view.blocks[i].state for i in range(4)] == ["null", "in_use", "in_use", "empty"]
    assert view.blocks[1].owners == ("a",)
    assert view.blocks[1].ref_cnt == 1
    assert (view.blocks[1].block_hash, view.blocks[1].stored_by) == (77, "a")
    assert view.blocks[1].stored_step == 1
    assert [view.blocks[i].num_filled for i in (1, 2, 3)] == [4, 2, 0]
    assert [view.blocks[i].index for i in (1, 2)] == [0, 1]
    assert view.block_text(1) == "abcd"
    assert view.block_text(2) == "ef"
    assert (view.num_used, view.num_kept, view.num_empty) == (2, 0, 5)
    assert list(view.free_queue) == [3, 4, 5, 6, 7]
    assert len(view.blocks) == 8
    assert view.blocks[-1].block_id == 7
    with pytest.raises(IndexError, match="8 blocks"):
        view.blocks[8]


def test_freed_blocks_go_to_the_tail_in_the_order_of_the_events():
    view = make_view()
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6))
    view.apply(
        EngineCoreOutputs(
            step=1,
            outputs=(EngineCoreOutput("a", (120,), finish_reason="length"),),
            kv_events=(BlockFreed(2, "a"), BlockFreed(1, "a")),
        )
    )

    assert list(view.free_queue) == [3, 4, 5, 6, 7, 2, 1]
    assert view.free_queue.first(2) == [3, 4]
    assert len(view.free_queue) == 7


def kept_block_view(**options):
    """Request a is over; block 1 keeps its first four tokens, block 2 nothing."""
    view = make_view(**options)
    view.apply(request("a"))
    stored = BlockStored(1, "a", 77, None, (97, 98, 99, 100), 0)
    view.apply(
        admit("a", [1, 2], 6, events=(BlockAllocated(1, "a"), BlockAllocated(2, "a"), stored))
    )
    view.apply(
        EngineCoreOutputs(
            step=1,
            outputs=(EngineCoreOutput("a", (120,), finish_reason="length"),),
            kv_events=(BlockFreed(2, "a"), BlockFreed(1, "a")),
        )
    )
    return view


def test_a_hit_takes_a_kept_block_out_of_the_middle_of_the_queue():
    view = kept_block_view()
    view.apply(request("b", step=1))
    view.apply(
        admit("b", [1, 3], 2, step=2, computed=4,
              events=(BlockTouched(1, "b", "a", 1), BlockAllocated(3, "b")))
    )  # fmt: skip

    assert list(view.free_queue) == [4, 5, 6, 7, 2]
    assert view.blocks[1].owners == ("b",)
    assert view.blocks[1].stored_by == "a"
    assert [hit.block_id for hit in view.hits] == [1]
    assert view.requests["b"].num_cached_tokens == 4
    assert view.this_step.cached == 4
    assert view.totals.cached_tokens == 4
    assert view.totals.prompt_tokens == 12


def test_marks_of_a_step_are_gone_in_the_next():
    view = kept_block_view()
    view.apply(request("b", step=1))
    view.apply(admit("b", [1], 2, step=2, computed=4, events=(BlockTouched(1, "b", "a", 1),)))
    assert view.hits
    view.apply(SchedulerOutput(step=3))

    assert not view.hits
    assert not view.written


def test_content_that_is_dropped_is_no_eviction():
    view = kept_block_view()
    view.apply(SchedulerOutput(step=2, kv_events=(BlockRemoved(1, 77, None),)))

    assert view.blocks[1].state == "empty"
    assert view.num_kept == 0
    assert view.evicted == []
    assert view.totals.evictions == 0


def test_an_eviction_says_whose_content_went_and_is_marked_for_one_step():
    view = kept_block_view()
    view.apply(request("b", step=1))
    events = (BlockAllocated(3, "b"), BlockRemoved(1, 77, "b"), BlockAllocated(1, "b"))
    view.apply(admit("b", [3, 1], 2, step=2, events=events))
    (eviction,) = view.evicted
    assert (eviction.stored_by, eviction.stored_step, eviction.for_request_id) == ("a", 1, "b")
    assert view.totals.evictions == 1
    assert view.written == {3}  # the other waits for drafts
    changes = view.track()
    view.apply(SchedulerOutput(step=3))

    assert view.evicted == []
    assert changes.blocks == {1, 3}


def test_a_reset_empties_all_kept_blocks():
    view = kept_block_view()
    view.apply(SchedulerOutput(step=2, kv_events=(AllBlocksCleared(),)))

    assert (view.num_kept, view.num_empty) == (0, 7)
    assert view.block_text(1) == ""


def test_the_text_of_a_kept_block_outlives_its_request():
    view = kept_block_view(keep_finished=0)
    view.apply(SchedulerOutput(step=2, finished_req_ids=("a",)))

    assert "a" not in view.requests
    assert view.blocks[1].state == "kept"
    assert view.block_text(1) == "abcd"


def test_a_block_without_known_text_shows_token_ids():
    view = make_view()
    bare = EngineCoreRequest(
        request_id="a", prompt_token_ids=(5, 6, 7), sampling_params=SamplingParams()
    )
    view.apply(bare)
    view.apply(admit("a", [1], 3))

    assert view.block_text(1) == "5 6 7"
    assert view.token_texts("a") == ["", "", ""]


def test_a_million_blocks_cost_what_happens_in_them():
    view = make_view(num_blocks=1_000_000)
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6))

    assert view.num_empty == 999_997
    assert view.free_queue.first(3) == [3, 4, 5]
    assert isinstance(view.free_queue._base, range)
    assert len(view._fold.pool._known) == 2


# -- what it says of requests ----------------------------------------------------------------


def test_milestones_and_text_of_a_request():
    view = make_view()
    view.apply(request("a", step=3, time=10.0))
    view.apply(admit("a", [1, 2], 6, step=4, time=10.5))
    view.apply(EngineCoreOutputs(step=4, time=10.7, outputs=(EngineCoreOutput("a", (33, 34)),)))
    view.apply(
        RequestOutput(step=4, request_id="a", outputs=(CompletionOutput(0, "!?", (33, 34)),))
    )
    a = view.requests["a"]

    assert (a.arrival_step, a.arrival_time) == (3, 10.0)
    assert (a.first_scheduled_step, a.first_scheduled_time) == (4, 10.5)
    assert (a.first_token_step, a.first_token_time) == (4, 10.7)
    assert a.finish_step is None
    assert a.text == "!?"
    assert a.output_token_ids == [33, 34]
    assert view.token_texts("a") == [*"abcdef", "", "!?"]
    assert view.this_step.duration_s == pytest.approx(0.2)
    assert view.boundary == "RequestOutput"


def test_text_that_was_held_back_joins_the_last_token():
    view = make_view()
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6))
    view.apply(EngineCoreOutputs(step=1, outputs=(EngineCoreOutput("a", (33,)),)))
    for text, ids in (("", (33,)), ("!", ())):
        view.apply(RequestOutput(step=1, request_id="a", outputs=(CompletionOutput(0, text, ids),)))

    assert view.token_texts("a")[6:] == ["!"]


def test_a_stop_string_ends_a_request_before_the_engine_lets_go_of_it():
    view = make_view()
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6))
    view.apply(EngineCoreOutputs(step=1, outputs=(EngineCoreOutput("a", (33,)),)))
    ended = CompletionOutput(0, "", (33,), finish_reason="stop", stop_reason="\n\n")
    view.apply(RequestOutput(step=1, request_id="a", outputs=(ended,), finished=True))

    assert view.requests["a"].status == "finished"
    assert view.running == ()
    assert view.num_running == 0
    assert view.blocks[1].owners == ("a",)
    assert view.why("a") == 'finished at step 1: stop string "\\n\\n"'
    # the engine's own state still has it, and so has the snapshot
    assert [r.status for r in view.snapshot().requests] == ["running"]

    freed = (BlockFreed(2, "a"), BlockFreed(1, "a"))
    view.apply(SchedulerOutput(step=2, finished_req_ids=("a",), kv_events=freed))

    assert view.requests["a"].finish_reason == "stop"
    assert view.requests["a"].finish_step == 1
    assert view.num_used == 0
    assert view.snapshot().requests == ()
    assert view.totals.finished == 1


def test_an_abort_without_output_ends_with_the_next_step():
    view = make_view()
    view.apply(request("a"))
    view.apply(SchedulerOutput(step=1, finished_req_ids=("a",)))

    assert view.requests["a"].finish_reason == "abort"
    assert view.why("a") == "finished at step 1: aborted"
    assert view.waiting == ()


def test_an_abort_while_the_model_runs_is_seen_by_its_blocks():
    view = make_view()
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6))
    view.apply(EngineCoreOutputs(step=1, kv_events=(BlockFreed(2, "a"), BlockFreed(1, "a"))))

    assert view.requests["a"].finish_reason == "abort"
    assert view.running == ()


def test_an_id_that_comes_again_before_its_end_is_reported_is_a_new_request():
    view = make_view()
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6))
    view.apply(request("a", prompt="xyz", step=1))
    freed = (BlockFreed(2, "a"), BlockFreed(1, "a"))
    view.apply(
        admit("a", [3], 3, step=2, prompt="xyz", events=(*freed, BlockAllocated(3, "a")),
              finished_req_ids=("a",))
    )  # fmt: skip

    assert view.requests["a"].status == "running"
    assert view.requests["a"].block_ids == [3]
    assert view.requests["a"].prompt == "xyz"
    assert view.running == ("a",)
    assert list(view.free_queue) == [4, 5, 6, 7, 2, 1]
    # and what it holds is counted from its own blocks
    view.apply(EngineCoreOutputs(step=2, kv_events=(BlockFreed(3, "a"),)))
    assert view.requests["a"].finish_reason == "abort"


def test_a_forced_reset_is_a_preemption_though_nothing_lists_it():
    view = make_view()
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6))
    view.apply(SchedulerOutput(step=2, kv_events=(BlockFreed(2, "a"), BlockFreed(1, "a"))))

    assert view.requests["a"].status == "preempted"
    assert view.requests["a"].num_preemptions == 1
    assert view.requests["a"].num_lost_tokens == 6
    assert view.waiting == ("a",)


def test_tokens_computed_again_after_a_preemption_are_counted_apart():
    view = make_view()
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6))
    view.apply(EngineCoreOutputs(step=1, outputs=(EngineCoreOutput("a", (33,)),)))
    freed = (BlockFreed(2, "a"), BlockFreed(1, "a"))
    view.apply(SchedulerOutput(step=2, preempted_req_ids=("a",), kv_events=freed))
    again = CachedRequestData(
        req_ids=("a",), resumed_req_ids=("a",), new_block_ids=(((3, 4),),),
        num_computed_tokens=(0,), num_output_tokens=(1,),
    )  # fmt: skip
    view.apply(
        SchedulerOutput(
            step=3, scheduled_cached_reqs=again, num_scheduled_tokens={"a": 7},
            total_num_scheduled_tokens=7,
            kv_events=(BlockAllocated(3, "a"), BlockAllocated(4, "a")),
        )
    )  # fmt: skip
    counts = view.this_step

    assert (counts.scheduled, counts.recomputed, counts.prefill, counts.decode) == (7, 6, 0, 1)
    assert view.requests["a"].num_recomputed_tokens == 6
    assert view.requests["a"].block_ids == [3, 4]
    assert view.totals.preemptions == 1


def test_rejected_drafts_do_not_count_as_computed():
    view = make_view()
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6))
    view.apply(EngineCoreOutputs(step=1, outputs=(EngineCoreOutput("a", (33,)),)))
    known = CachedRequestData(
        req_ids=("a",), new_block_ids=(((3,),),), num_computed_tokens=(6,), num_output_tokens=(1,)
    )
    view.apply(
        SchedulerOutput(
            step=2,
            scheduled_cached_reqs=known,
            num_scheduled_tokens={"a": 4},
            scheduled_spec_decode_tokens={"a": (1, 2, 3)},
            kv_events=(BlockAllocated(3, "a"),),
        )
    )
    assert view.requests["a"].num_computed_tokens == 10
    assert view.blocks[3].num_filled == 2
    view.apply(EngineCoreOutputs(step=2, outputs=(EngineCoreOutput("a", (1, 9)),)))

    assert view.requests["a"].num_computed_tokens == 8
    assert view.blocks[3].num_filled == 0


def test_an_answer_that_comes_after_the_next_step_counts_in_that_with_its_own_duration():
    view = make_view()
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6, time=1.0))
    view.apply(SchedulerOutput(step=2, time=1.5))
    view.apply(EngineCoreOutputs(step=1, time=3.0, outputs=(EngineCoreOutput("a", (33,)),)))

    assert view.step == 2
    assert (view.this_step.step, view.this_step.output) == (2, 1)
    assert view.this_step.duration_s == 2.0
    assert view.totals.output_tokens == 1


def test_tokens_per_second_is_over_the_last_steps_and_not_over_pauses():
    view = make_view()
    view.apply(request("a"))
    view.apply(admit("a", [1, 2], 6, time=1.0))
    assert view.tokens_per_s is None
    for step, time in ((1, 2.0), (2, 3.0), (3, 5.0)):
        if step > 1:
            view.apply(SchedulerOutput(step=step, time=time - 0.5))
        outputs = (EngineCoreOutput("a", (33, 34)),)
        view.apply(EngineCoreOutputs(step=step, time=time, outputs=outputs))
    assert view.tokens_per_s == pytest.approx(4 / 3)
    end(view, "a", 4)
    view.apply(request("b", step=4))
    view.apply(admit("b", [3], 4, step=5, time=1000.0))
    view.apply(EngineCoreOutputs(step=5, time=1001.0, outputs=(EngineCoreOutput("b", (33,)),)))

    assert view.tokens_per_s is None


def test_finished_requests_are_dropped_oldest_first_when_told_to(tiny_engine):
    engine = tiny_engine(num_blocks=40)
    view = follow(engine, keep_finished=3)
    for _ in range(10):
        engine.add("abc", max_tokens=2)
        engine.run()
    engine.step()

    assert list(view.requests) == ["r8", "r9", "r10"]
    assert view.totals.finished == 10
    assert differences(view, engine.snapshot()) == []


# -- decisions ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_every_live_request_has_exactly_one_decision_per_step(tiny_engine, random_life, policy):
    engine = tiny_engine(policy=policy, seed=1, num_blocks=9, max_num_seqs=2)
    life = random_life(engine, 5)
    seen = []

    def fold(boundary):
        view.apply(boundary)
        if isinstance(boundary, SchedulerOutput):
            live = {r.id for r in engine.requests.values()}
            assert set(view.decisions) == live
            assert len(boundary.decisions) + (boundary.behind.count if boundary.behind else 0) == (
                len(live)
            )
            seen.extend(decision.code for decision in view.decisions.values())

    snapshot, _ = engine.tap.follow(fold, strict=True)
    view = EngineView(snapshot)
    for _ in range(300):
        life.act()

    assert {Code.BEHIND, Code.AFTER_PREEMPTION, Code.SEATS, Code.DECODE} <= set(seen)


def test_a_request_behind_the_head_knows_how_many_are_ahead(tiny_engine):
    engine = tiny_engine(max_num_seqs=1)
    view = follow(engine)
    for _ in range(4):
        engine.add("abc")
    engine.step()

    assert view.why("r2") == "waiting: the one seat is taken"
    assert view.why("r3") == "waiting: behind r2, 1 ahead"
    assert view.why("r4") == "waiting: behind r2, 2 ahead"
    late = engine.add("abc")
    assert view.why(late) == "waiting: arrived after the last step was scheduled"
    assert view.decision(late) is None
    assert late not in view.decisions


def test_sentences_of_many_are_those_of_each(busy_stream):
    snapshot, structs, _ = busy_stream
    view = EngineView(snapshot)
    for boundary in structs:
        view.apply(boundary)
        together = view.sentences(view.requests)
        assert together == {i: view.why(i) for i in view.requests}


# -- owner slots ---------------------------------------------------------------------------


def end(view, request_id, step):
    view.apply(SchedulerOutput(step=step, finished_req_ids=(request_id,)))


def test_requests_take_the_first_eight_slots_and_then_the_next():
    view = make_view()
    for number in range(26):
        view.apply(request(f"r{number}"))

    slots = [view.requests[f"r{n}"].slot for n in range(26)]
    assert slots == [*range(24), 254, 254]


def test_the_slot_that_has_rested_longest_goes_first():
    view = make_view()
    for number in range(8):
        view.apply(request(f"r{number}"))
    end(view, "r5", 1)
    end(view, "r2", 2)
    view.apply(request("new"))
    view.apply(request("newer"))

    assert view.requests["new"].slot == 5
    assert view.requests["newer"].slot == 2
    # the one that lost its slot has none now, so that a hue is one request
    assert view.requests["r5"].slot == 254


def test_a_slot_whose_blocks_are_still_kept_goes_last():
    view = kept_block_view()  # a has slot 0 and a kept block
    for number in range(7):
        view.apply(request(f"r{number}"))
    end(view, "r3", 2)
    changes = view.track()
    view.apply(request("new"))
    view.apply(request("newer"))

    assert view.requests["new"].slot == 4
    assert view.requests["newer"].slot == 0
    assert view.block_slot(view.blocks[1]) == 254
    assert 1 in changes.blocks
    assert "a" in changes.requests


def test_requests_that_are_not_listed_any_more_hold_no_slot():
    view = make_view(keep_finished=0)
    for number in range(30):
        view.apply(request(f"r{number}", step=number))
        slot = view.requests[f"r{number}"].slot
        end(view, f"r{number}", number + 1)

    assert slot < 8


def test_a_block_shows_the_slot_of_its_oldest_holder_or_of_its_storer():
    view = kept_block_view()
    view.apply(request("b", step=1))
    assert view.block_slot(view.blocks[1]) == view.requests["a"].slot
    view.apply(admit("b", [1], 2, step=2, computed=4, events=(BlockTouched(1, "b", "a", 1),)))

    assert view.block_slot(view.blocks[1]) == view.requests["b"].slot
    assert view.block_slot(view.blocks[5]) == 255


def test_changes_tell_what_to_look_at_again():
    view = make_view()
    changes = view.track()
    view.apply(request("a"))
    view.apply(request("b"))
    assert changes.requests == {"a", "b"}
    changes.clear()
    view.apply(admit("a", [1, 2], 6))

    assert changes.blocks == {1, 2}
    assert changes.requests == {"a"}


def test_what_is_no_struct_of_the_stream_is_refused():
    with pytest.raises(TypeError, match="EngineInfo is not a boundary struct"):
        make_view().apply(make_view().info)
