"""The story of a block: its history, its state at a step, and when its content will go."""

from __future__ import annotations

import pytest

from lmscope.boundary import AllBlocksCleared, BlockAllocated, BlockRemoved, BlockTouched
from lmscope.errors import RecordingError
from lmscope.scope.recording import record


@pytest.fixture(scope="module", params=range(2))
def lived(request, tiny_engine, random_life):
    """The recording of a random life with hits, evictions, preemptions and resets."""
    engine = tiny_engine(num_blocks=14, seed=request.param)
    life = random_life(engine, request.param)
    with record(engine) as recording:
        for _ in range(150):
            life.act()
        engine.run()
        engine.step()
    return recording


def events_after(recording, step):
    """KV events of the steps after one, in order."""
    for boundary in recording.boundaries:
        if boundary.step > step:
            yield from getattr(boundary, "kv_events", ())


# -- what it says ------------------------------------------------------------------------------


def test_the_state_is_that_of_the_step(lived):
    for step in lived.steps[::2]:
        view = lived.at(step)
        queue = list(view.free_queue)
        for block_id in range(1, 14):
            story, block = lived.block(block_id, step), view.blocks[block_id]
            assert (story.step, story.state, story.owners) == (step, block.state, block.owners)
            assert (story.block_hash, story.stored_by, story.stored_step, story.token_ids) == (
                (block.block_hash, block.stored_by, block.stored_step, block.token_ids)
            )
            place = None if block.owners else queue.index(block_id) + 1
            assert (story.queue_place, story.num_free) == (place, len(queue))
            is_kept = block.state == "kept"
            assert story.allocations_to_eviction == (place if is_kept else None)


def test_its_content_goes_after_as_many_allocations_as_it_says(lived):
    """Unless the cache is reset or it is hit; one earlier for each block ahead that is hit."""
    num_checked = 0
    for step in lived.steps[::2]:
        for block_id in range(1, 14):
            away = lived.block(block_id, step).allocations_to_eviction
            if away is None:
                continue
            ahead = set(lived.at(step).free_queue.first(away - 1))
            for event in events_after(lived, step):
                if isinstance(event, AllBlocksCleared):
                    break
                if isinstance(event, BlockTouched):
                    if event.block_id == block_id:
                        break
                    away -= event.block_id in ahead
                    ahead.discard(event.block_id)
                elif isinstance(event, BlockAllocated):
                    away -= 1
                    ahead.discard(event.block_id)
                elif isinstance(event, BlockRemoved) and event.block_id == block_id:
                    assert away == 1
                    num_checked += 1
                    break
    assert num_checked > 20


def test_the_history_is_all_that_was_told_of_the_block(lived):
    names = {"evicted": "removed", "dropped": "removed"}
    events = lived.frames.blocks
    for block_id in range(1, 14):
        rows = events[events.block_id == block_id]
        moments = [m for m in lived.block(block_id).history if m.event != "cleared"]
        assert [(m.step, names.get(m.event, m.event)) for m in moments] == [
            (row.step, row.event) for row in rows.itertuples()
        ]
        for moment, row in zip(moments, rows.itertuples(), strict=True):
            assert moment.request_id == row.request_id
            assert moment.time_s == pytest.approx(row.time_s)
            if moment.block_hash is not None:
                assert f"{moment.block_hash:016x}" == row.block_hash
            if moment.event in ("touched", "evicted"):
                assert (moment.stored_by, moment.stored_step) == (row.stored_by, row.stored_step)


def test_a_reset_is_told_of_blocks_that_kept_something(tiny_engine):
    engine = tiny_engine()
    with record(engine) as recording:
        engine.add("abcde", max_tokens=1)
        engine.run()
        engine.reset()
        engine.step()
    full, half, unused = (recording.block(block_id) for block_id in (1, 2, 5))

    assert [m.event for m in full.history] == ["allocated", "stored", "freed", "cleared"]
    assert (full.history[-1].stored_by, full.history[-1].stored_step) == ("r1", 1)
    assert [m.event for m in half.history] == ["allocated", "freed"]
    assert unused.history == ()


# -- in words ----------------------------------------------------------------------------------


def test_it_tells_state_queue_and_past_in_three_sentences(tiny_engine):
    engine = tiny_engine(num_blocks=5)
    with record(engine) as recording:
        engine.add("abcdef", max_tokens=1)
        engine.run()
        engine.add("abcdxyz", max_tokens=1)
        engine.run()
        engine.add("zzzzzzzzyyyyyy", max_tokens=2)
        engine.run()

    assert str(recording.block(1, step=0)) == (
        "Block 1, step 0: free and empty. Place 1 of 4 in the free queue. "
        "So far: nothing happened to it."
    )
    assert str(recording.block(1, step=1)) == (
        'Block 1, step 1: free, content kept; r1 filled it in step 1 "abcd". '
        "Place 4 of 4 in the free queue: allocation 4 from now evicts it, unless it is hit before. "
        "So far: handed out once, filled once, freed once; last freed by r1 in step 1."
    )
    assert str(recording.block(1, step=2)).endswith(
        "So far: handed out once, filled once, freed 2 times, hit once; last freed by r2 in step 2."
    )
    assert "evicted once" in str(recording.block(1))
    assert str(recording.block(0)) == "Block 0, step 4: the null block, which is never handed out."


def test_a_block_in_use_names_who_holds_it(tiny_engine):
    engine = tiny_engine()
    with record(engine) as recording:
        engine.add("abcdefg")
        engine.add("abcdxyz")
        engine.step()
    story = recording.block(1)

    assert story.owners == ("r1", "r2")
    assert (story.queue_place, story.allocations_to_eviction) == (None, None)
    assert str(story) == (
        'Block 1, step 1: in use by r1, r2; r1 filled it in step 1 "abcd". '
        "So far: handed out once, filled once, hit once; last hit by r2 in step 1."
    )
    assert str(recording.block(2)).startswith("Block 2, step 1: in use by r1. So far")


def test_a_recording_that_began_late_says_so_and_knows_what_lay_in_the_block(tiny_engine):
    engine = tiny_engine()
    engine.add("abcdef", max_tokens=1)
    engine.run()
    with record(engine) as recording:
        engine.add("abcdxy", max_tokens=1)
        engine.run()
    story = recording.block(1)

    assert story.since_step == 2
    assert [(m.event, m.stored_by, m.stored_step) for m in story.history] == [
        ("touched", "r1", 1),
        ("freed", None, 0),
    ]
    assert "Since step 2: hit once, freed once" in str(story)
    assert story.history[0].block_hash == recording.snapshot.blocks[0].block_hash


def test_the_table_has_a_row_for_each_event_and_escapes_ids(tiny_engine):
    engine = tiny_engine()
    with record(engine) as recording:
        engine.add("<b>d</b>", request_id="<script>", max_tokens=2)
        engine.run()
    story = recording.block(1)
    table = story._repr_html_()

    assert "<script>" not in table
    assert "<b>" not in table
    assert "&lt;script&gt;" in table
    assert table.count("<tr>") == 1 + len(story.history)


# -- what is not there -------------------------------------------------------------------------


def test_blocks_and_steps_that_are_not_there_name_those_that_are(tiny_engine):
    engine = tiny_engine(num_blocks=9)
    with record(engine) as recording:
        engine.add()
        engine.step()

    for block_id in (-1, 9):
        with pytest.raises(RecordingError, match=f"block id is {block_id}; .* blocks 0 to 8"):
            recording.block(block_id)
    with pytest.raises(RecordingError, match=r"step is 2; .* steps 0 to 1"):
        recording.block(1, step=2)
    for wrong in ("1", 1.0, True):
        with pytest.raises(TypeError, match="it takes an integer"):
            recording.block(wrong)
