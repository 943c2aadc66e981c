"""The picture in characters."""

from __future__ import annotations

import pytest

from lmscope.boundary import EngineInfo, EngineSnapshot, ModelRunnerOutput
from lmscope.scope.text_picture import text_picture
from lmscope.scope.view import EngineView


def follow(engine):
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    return view


def test_it_reads_as_a_whole(tiny_engine):
    engine = tiny_engine(num_blocks=14, vocabulary=1)
    view = follow(engine)
    engine.add("abcdefgh", max_tokens=2)
    engine.run()
    engine.add("abcdefghi", max_tokens=5)
    engine.add("abcdefghj", max_tokens=5)
    engine.add("xyz", max_tokens=5)
    engine.step()

    assert text_picture(view, last_step=9).splitlines() == [
        "lmscope  step 3/9   5/13 blocks used, 2 shared, 0 kept   3 running, 0 waiting"
        "   55 % from cache",
        "blocks   #++.BCD.......",
        "         # null  + shared  . empty  A in use  B r2  C r3  D r4",
        "r2       prefill: 1 token, 8 came from the cache",
        "r3       prefill: 1 token, 8 came from the cache",
        "r4       prefill: 3 tokens",
    ]


def test_the_lit_request_is_the_one_that_is_explained(tiny_engine):
    engine = tiny_engine()
    view = follow(engine)
    for _ in range(3):
        engine.add("abc")
    engine.step()
    lines = text_picture(view, lit=["r2"]).splitlines()

    assert lines[-1] == "r2       prefill: 3 tokens"
    assert not any(line.startswith("r1") for line in lines)


def test_kept_blocks_are_small_letters_of_who_stored_them(tiny_engine):
    engine = tiny_engine(num_blocks=8)
    view = follow(engine)
    engine.add("abcdefgh", max_tokens=2)
    engine.run()

    lines = text_picture(view).splitlines()
    assert lines[1] == "blocks   #aa....."
    assert lines[2] == "         # null  . empty  a kept  A r1"
    assert lines[3] == "r1       finished at step 2: reached max_tokens 2"


def test_many_requests_are_cut_and_counted(tiny_engine):
    engine = tiny_engine(max_num_seqs=2)
    view = follow(engine)
    for _ in range(20):
        engine.add("abc")
    engine.step()
    lines = text_picture(view).splitlines()

    assert lines[-1].strip() == "12 more"
    assert len(lines) == 3 + 8 + 1


def test_a_large_pool_is_drawn_in_bins():
    info = EngineInfo(
        model="m",
        block_size=16,
        num_blocks=100_000,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=1024,
    )
    view = EngineView(EngineSnapshot(info=info, free_queue=range(1, 100_000)))
    text = text_picture(view)

    assert "1 character = 98 blocks, what most are" in text
    assert len(text) < 2000
    assert "null" not in text


def test_a_bin_shows_what_most_of_its_blocks_are(tiny_engine):
    engine = tiny_engine(num_blocks=2048, budget=64)
    view = follow(engine)
    engine.add("abcdefgh" * 5, max_tokens=2)
    engine.step()
    lines = text_picture(view).splitlines()

    assert lines[1].startswith("blocks   AAAAAA....")
    assert "1 character = 2 blocks, what most are" in lines[-2]


@pytest.mark.parametrize("width", [40, 60, 100])
def test_lines_keep_to_the_width_and_reasons_are_not_cut(busy_stream, width):
    snapshot, structs, _ = busy_stream
    view = EngineView(snapshot)
    for boundary in structs:
        view.apply(boundary)
        lines = text_picture(view, width=width).splitlines()
        assert max(len(line) for line in lines if not line.startswith("lmscope")) <= width
        joined = " ".join(line[9:].strip() for line in lines)
        for request_id in view.running[:8]:
            assert view.why(request_id) in joined


def test_the_views_that_are_named_are_those_that_it_tells(tiny_engine):
    engine = tiny_engine(num_blocks=14, vocabulary=1)
    view = follow(engine)
    engine.add("abcdefghij", max_tokens=5)
    engine.add("abcdefghxy", max_tokens=5)
    engine.step()
    engine.step()
    everything = text_picture(view)

    texts = {
        name: text_picture(view, views=[name])
        for name in ("timeline", "blocks", "tree", "tokens", "requests", "debugger")
    }

    header = everything.splitlines()[0]
    assert {text.splitlines()[0] for text in texts.values()} == {header}
    firsts = {name: text.splitlines()[1].split(" ")[0] for name, text in texts.items()}
    assert firsts["timeline"] == "steps"
    assert firsts["blocks"] == "blocks"
    assert firsts["tree"] == "tree"
    assert firsts["debugger"] == "stands"
    assert len(set(texts.values())) == len(texts)
    assert text_picture(view, views=["blocks", "requests"]) == everything


def test_by_attention_a_block_says_its_share(tiny_engine):
    engine = tiny_engine(num_blocks=14, vocabulary=1)
    view = follow(engine)
    engine.add("abcdefghijkl", max_tokens=2)
    engine.add("xyz", max_tokens=5)
    engine.step()
    assert "attention was not measured in this step" in text_picture(view, colour="attention")

    first, second = (view.requests[i].block_ids for i in ("r1", "r2"))
    shares = {"r1": (0.8, 0.15, 0.05), "r2": (1.0,)}
    view.apply(ModelRunnerOutput(step=1, time=1.0, req_ids=("r1", "r2"), attention_mass=shares))
    lines = text_picture(view, colour="attention").splitlines()
    drawn = lines[1].removeprefix("blocks").strip()

    assert (len(drawn), drawn[0]) == (14, "#")
    assert [drawn[i] for i in first[:3]] == ["8", "3", "2"], "9 times the root of the share of top"
    assert drawn[second[0]] == "9"
    assert "0 to 9: next to none to 50.0 % of the step's attention" in lines[2]
    (most,) = (line for line in lines if line.startswith("most"))
    assert most.split() == [
        *("most", "block", f"{second[0]}", "50.0", "%", "(r2),"),
        *("block", f"{first[0]}", "40.0", "%", "(r1),"),
        *("block", f"{first[1]}", "7.5", "%", "(r1),", "block", f"{first[2]}", "2.5", "%", "(r1)"),
    ]


def test_a_large_pool_by_attention_shows_the_largest_share_of_a_character(tiny_engine):
    engine = tiny_engine(num_blocks=4096, vocabulary=1)
    view = follow(engine)
    engine.add("abcdefghijkl", max_tokens=2)
    engine.step()
    view.apply(
        ModelRunnerOutput(step=1, time=1.0, req_ids=("r1",), attention_mass={"r1": (0.2, 0.1, 0.7)})
    )
    text = text_picture(view, colour="attention")
    assert text.splitlines()[1].removeprefix("blocks").strip().startswith("9")
    assert "1 character = 4 blocks, their largest share" in text
