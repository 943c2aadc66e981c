"""The frames: what a decoder makes of deltas is what the view says, and limits hold."""

from __future__ import annotations

import json
import math
import random
from unittest.mock import ANY

import numpy as np
import pytest

from lmscope.boundary import (
    BlockAllocated,
    CompletionOutput,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    Logprob,
    NewRequestData,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.sampling_params import SamplingParams
from lmscope.scope.picture import PictureEncoder
from lmscope.scope.picture_bins import Bins
from lmscope.scope.run_log import LOG_NAMES
from lmscope.scope.view import EngineView

EMPTY, IN_USE, KEPT, NULL = range(4)


class Mirror:
    """A decoder of docs/picture.md: what a reader knows after the frames so far."""

    def __init__(self):
        self.seq = -1
        self.log = {}

    def apply_message(self, frame):
        header, buffers = frame.to_message()
        header = json.loads(json.dumps(header))  # it must survive the way to the page
        if header["k"] == "full":
            columns = dict(zip(["slot", "state", "ref", "fill"], buffers, strict=True))
        else:
            columns = dict(zip(["i", "slot", "state", "ref", "fill"], buffers, strict=True))
            columns["i"] = np.frombuffer(columns["i"], "<u4")
        self._apply(header, columns)

    def apply_page(self, frame):
        page = json.loads(json.dumps(frame.to_page()))
        self._apply(page, page["columns"])

    def _apply(self, header, columns):
        assert header["v"] == 1
        assert header["seq"] == self.seq + 1
        self.seq = header["seq"]
        self.header = header
        if "struct" in header:
            self.struct = header["struct"]
        for entry in header.get("log", []):
            self.log[entry[1]] = entry[3:]
        counts = [header["stat"][name] for name in LOG_NAMES]
        self.log[header["step"]] = [*counts, header.get("preempted", [])]
        tree = header.get("tree")
        if tree is not None:
            nodes = {} if header["k"] == "full" else self.tree["nodes"]
            for node in tree["nodes"]:
                known = nodes.get(node[0])
                nodes[node[0]] = [*known[:3], node[1], *known[4:]] if len(node) == 2 else node
            for node_id in tree.get("gone", []):
                del nodes[node_id]
            self.tree = {**tree, "nodes": nodes}
        if header["k"] == "full":
            self.columns = {n: np.array(c, np.uint8) for n, c in columns.items()}
            self.rows = {}
            self.cells = {cell[0]: cell for cell in header["cells"]}
            self.info = header["info"]
        else:
            ids = list(columns["i"])
            assert ids == sorted(set(ids))
            for name in ("slot", "state", "ref", "fill"):
                self.columns[name][ids] = np.array(columns[name], np.uint8)
            for cell in header["cells"]:
                self.cells[cell[0]] = cell
            for request_id in header["gone"]:
                del self.rows[request_id]
        for row in header["rows"]:
            self.rows[row["id"]] = self._merged(self.rows.get(row["id"], {}), dict(row))

    def _merged(self, old, row):
        add, tokens, did = row.pop("add", ""), row.pop("tokens", []), row.pop("did", None)
        if "text" in row:
            known = {**row, "tokens": tokens, "did": did or []}
        else:
            known = {**old, **row}
            known["text"] = old["text"] + add
            known["tokens"] = old["tokens"] + tokens
            known["did"] = [list(one) for one in old["did"]]
            if did is not None:
                known["did"] = [one for one in known["did"] if one[0] < did[0][0]] + did
            elif "computed" in row and known["did"]:
                # nothing is said: what it did last goes on up to this step
                last = known["did"][-1]
                last[1] = max(last[1], self.header["step"] - last[0] + 1)
        most = 16 if known["state"] == "finished" else 48
        known["tokens"] = known["tokens"][-most:]
        return known

    def state(self):
        """All of it, without cells of blocks that have nothing to say."""
        cells = {
            i: cell for i, cell in self.cells.items() if cell[1:] != [[], "", None, None, None]
        }
        columns = {name: column.tolist() for name, column in self.columns.items()}
        keys = ("step", "boundary", "at", "where", "phase", "stat", "next", "note")
        header = {key: self.header[key] for key in keys}
        may_miss = {key: self.header.get(key) for key in ("preempted", "misses")}
        return self.rows, cells, columns, header, may_miss, self.struct, self._known_tree()

    def _known_tree(self):
        """The tree without ids of nodes, and without texts that nobody could tell any more."""
        names = {-1: ()}
        nodes = list(self.tree["nodes"].values())
        while nodes:  # a node may have got another parent, so they come in no order
            node_id, parent, start, count, _, readers, *kept = nodes.pop(0)
            if parent in names:
                names[node_id] = (names[parent], start, count, readers, kept)
            else:
                assert parent in self.tree["nodes"]
                nodes.append([node_id, parent, start, count, _, readers, *kept])
        hits = [(names[int(i)], hit) for i, hit in self.tree.get("hits", {}).items()]
        waiting = [(i, names[node], n) for i, node, n in self.tree.get("waiting", [])]
        return sorted(names.values(), key=repr), sorted(hits, key=repr), waiting


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", ["apply_message", "apply_page"])
def test_deltas_add_up_to_the_full_picture(tiny_engine, random_life, policy, seed, way):
    engine = tiny_engine(policy=policy, seed=seed, num_blocks=40)
    life = random_life(engine, seed)
    rng = random.Random(seed)
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot, keep_finished=5)
    encoder, mirror = PictureEncoder(view, epoch=7), Mirror()
    kinds = []
    for _ in range(250):
        life.act()
        if rng.random() < 0.6:  # a reader does not get a frame for everything
            frame = encoder.delta("live")
            kinds.append(frame.header["k"])
            getattr(mirror, way)(frame)
            fresh = Mirror()
            fresh.apply_message(PictureEncoder(view, epoch=7).full("live"))
            assert mirror.state() == fresh.state()

    assert kinds[0] == "full"
    assert kinds.count("delta") > 80
    # no step is lost, however few frames there were
    steps = [record.step for record in view.log.records]
    assert steps == list(range(steps[-1] + 1))
    last = mirror.header["step"]
    ended = {r.step: [*r.counts, list(r.preempted)] for r in view.log.records if r.step < last}
    assert {step: mirror.log[step] for step in ended} == ended


def test_columns_say_what_the_view_says(busy_stream):
    snapshot, structs, _ = busy_stream
    view = EngineView(snapshot)
    encoder, mirror = PictureEncoder(view), Mirror()
    seen = set()
    for boundary in structs:
        view.apply(boundary)
        mirror.apply_message(encoder.delta("live"))
        hits = {hit.block_id for hit in view.hits}
        evicted = {gone.block_id for gone in view.evicted}
        for block in view.blocks:
            i = block.block_id
            column = {name: int(values[i]) for name, values in mirror.columns.items()}
            names = ["empty", "in_use", "kept", "null"]
            assert names[column["state"] & 0x0F] == block.state
            assert bool(column["state"] & 0x10) == (i in hits)
            assert bool(column["state"] & 0x20) == (i in evicted)
            assert bool(column["state"] & 0x40) == (i in view.written)
            assert column["slot"] == view.block_slot(block)
            assert column["ref"] == block.ref_cnt
            assert column["fill"] == block.num_filled
            seen.add(column["state"])
            if block.state in ("in_use", "kept"):
                cell = mirror.cells[i]
                assert cell[1] == list(block.owners)
                assert cell[2] == view.block_text(i)
                assert cell[3] == block.stored_by
        stat = mirror.header["stat"]
        assert stat["used"] + stat["kept"] + stat["empty"] == view.info.num_blocks - 1
        assert mirror.header["next"] == list(view.free_queue)[:10]
        assert {i: row["why"] for i, row in mirror.rows.items()} == view.sentences(view.requests)
        assert all(row["text"] == view.requests[i].text for i, row in mirror.rows.items())

    assert seen >= {EMPTY, IN_USE, KEPT, NULL, IN_USE | 0x10, IN_USE | 0x20 | 0x40}


def test_an_evicted_block_says_whose_content_it_was(busy_stream):
    snapshot, structs, _ = busy_stream
    view = EngineView(snapshot)
    encoder, mirror = PictureEncoder(view), Mirror()
    told = 0
    for boundary in structs:
        view.apply(boundary)
        mirror.apply_message(encoder.delta("live"))
        for eviction in view.evicted:
            assert mirror.cells[eviction.block_id][4] == eviction.stored_by
            told += 1

    assert told > 10


def test_the_frame_has_all_keys_of_the_protocol(tiny_engine):
    engine = tiny_engine(num_blocks=60)
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    engine.add("abc")
    encoder = PictureEncoder(view, epoch=3)
    full = encoder.full("ready").header
    engine.step()
    delta = encoder.delta("live").header
    both = {"v", "k", "seq", "epoch", "step", "boundary", "time", "phase", "stat", "next", "rows",
            "cells", "note", "at", "where", "struct", "tree"}  # fmt: skip

    assert set(full) == both | {"info"}
    assert set(delta) == both | {"gone", "misses"}
    assert (full["seq"], delta["seq"]) == (0, 1)
    assert (full["step"], delta["step"]) == (0, 1)
    assert (full["boundary"], delta["boundary"]) == ("EngineCoreRequest", "RequestOutput")
    assert (full["phase"], delta["phase"]) == ("ready", "live")
    assert full["epoch"] == delta["epoch"] == 3
    assert full["time"] == 0
    assert delta["time"] == pytest.approx(view.time - snapshot.time - 0.001, abs=1e-6)
    assert set(full["stat"]) == {
        "used", "kept", "empty", "shared", "hits", "evicted", "running", "waiting", "finished",
        "scheduled", "decode", "prefill", "recompute", "cached", "prompt_tokens",
        "cached_tokens", "output_tokens", "preemptions", "evictions", "step_ms", "device_ms",
        "tokens_per_s",
    }  # fmt: skip
    row = {"id", "slot", "state", "why", "prompt", "cached", "computed", "output", "lost", "max",
           "blocks", "shared", "preemptions", "arrived", "ended", "waited",
           "prompt_text"}  # fmt: skip
    assert set(full["rows"][0]) == row | {"text"}
    # a delta leaves out what did not change
    assert delta["rows"] == [
        {
            "id": "r1",
            "state": "running",
            "why": "prefill: 3 tokens",
            "computed": 3,
            "output": 1,
            "blocks": 1,
            "waited": 0,
            "add": view.requests["r1"].text,
            "tokens": [[1, 1, 4.0]],
            "did": [[1, 1, "p", 3]],
        }
    ]
    assert full["stat"]["step_ms"] is None
    assert delta["stat"]["step_ms"] == pytest.approx(2.0)


def test_nothing_changed_is_an_empty_delta(tiny_engine):
    engine = tiny_engine(num_blocks=60)
    view = EngineView(engine.snapshot())
    encoder = PictureEncoder(view)
    encoder.full("ready")
    frame = encoder.delta("ready")

    assert frame.header["rows"] == frame.header["cells"] == frame.header["gone"] == []
    assert [len(column) for column in frame.columns] == [0] * 5
    assert not {"log", "struct", "preempted", "misses", "tree"} & set(frame.header)


def test_many_changes_make_a_full_frame(tiny_engine):
    engine = tiny_engine(num_blocks=21, block_size=1)
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    encoder = PictureEncoder(view)
    encoder.full("ready")
    engine.add("abcd", max_tokens=9)
    engine.step()
    assert encoder.delta("live").header["k"] == "delta"
    engine.add("abcabc", max_tokens=9)
    engine.step()

    assert encoder.delta("live").header["k"] == "full"


def plain_view(num_blocks, **options):
    info = EngineInfo(
        model="m",
        block_size=16,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=1024,
    )
    return EngineView(EngineSnapshot(info=info, free_queue=range(1, num_blocks)), **options)


def arrive(view, count, prompt="hi"):
    for number in range(count):
        view.apply(
            EngineCoreRequest(
                request_id=f"r{number}",
                prompt_token_ids=(1, 2),
                sampling_params=SamplingParams(),
                prompt=prompt,
                prompt_offsets=(1, len(prompt)),
            )
        )


def test_a_long_list_is_cut_and_says_so():
    view = plain_view(64)
    arrive(view, 250)
    header = PictureEncoder(view).full("live").header

    assert [row["id"] for row in header["rows"]] == [f"r{n}" for n in range(100)]
    assert header["note"] == "100 requests are listed; 150 more wait"


def test_words_for_blocks_stop_at_2048_blocks():
    small, large = plain_view(2048), plain_view(2049)
    for view in (small, large):
        arrive(view, 1)
    assert PictureEncoder(large).full("live").header["cells"] == []
    assert len(PictureEncoder(large).full("live").columns[0]) == 2049


def test_a_million_blocks_are_told_in_bins_and_stay_small():
    view = plain_view(1_000_000)
    encoder = PictureEncoder(view, in_bins=True)
    full = encoder.full("ready")
    arrive(view, 1)
    begin(view, blocks=range(1, 2000))
    delta = encoder.delta("live")

    assert (full.header["bin"], delta.header["bin"]) == (489, 489)
    assert [len(column) for column in full.columns] == [2045] * 4
    assert [column.dtype.str for column in full.columns] == ["<u2", "<u2", "|u1", "|u1"]
    assert delta.header["k"] == "delta"
    bins, used, kept, slot, flags = (column.tolist() for column in delta.columns)
    assert bins == [0, 1, 2, 3, 4]
    assert used == [488, 489, 489, 489, 44]
    assert (kept, slot) == ([0] * 5, [0] * 5)
    assert flags == [0x40, 0, 0, 0, 0]
    for frame in (full, delta, encoder.full("live")):
        header, buffers = frame.to_message()
        assert len(json.dumps(header)) + sum(map(len, buffers)) < 64_000


def test_who_wants_single_blocks_gets_them_from_any_pool():
    view = plain_view(200_000)
    frame = PictureEncoder(view).full("ready")
    assert "bin" not in frame.header
    assert [column.nbytes for column in frame.columns] == [200_000] * 4
    assert frame.columns[0][0] == 255
    assert frame.columns[1][0] == NULL


def test_a_window_of_a_large_pool_tells_its_blocks_and_stays_small():
    view = plain_view(1_000_000)
    arrive(view, 1)
    begin(view, blocks=range(1, 2000))
    encoder = PictureEncoder(view, in_bins=True)
    encoder.window = (0, 1024)
    full = encoder.full("live")

    window = full.header["window"]
    assert (window["first"], window["count"], window["cells"]) == (0, 1024, [])
    in_use = {block_id for block_id, _, state, *_ in window["blocks"] if state & 0xF == 1}
    assert in_use == set(range(1, 1024))
    message, buffers = full.to_message()
    assert len(json.dumps(message)) + sum(map(len, buffers)) < 64_000
    assert "window" not in encoder.delta("live").header, "nothing in it has changed"

    encoder.window = (1990, 256)
    told = encoder.delta("live").header["window"]
    assert [cell[0] for cell in told["cells"]] == list(range(1990, 2000))
    assert [block[0] for block in told["blocks"]] == list(range(1990, 2000))
    encoder.window = (999_990, 1024)
    assert encoder.delta("live").header["window"]["count"] == 10


def test_bins_kept_up_are_the_same_as_bins_counted_anew():
    rng = np.random.default_rng(3)
    columns = {name: np.zeros(5000, np.uint8) for name in ("slot", "state", "ref", "fill")}
    columns["slot"][:] = 255
    bins = Bins(columns)
    assert (bins.size, bins.count) == (3, 1667)
    for _ in range(20):
        ids = rng.integers(0, 5000, 300)
        columns["state"][ids] = rng.choice([0, 1, 2, 0x11, 0x22, 0x41], 300)
        columns["ref"][ids] = rng.integers(0, 3, 300)
        columns["slot"][ids] = rng.choice([0, 5, 23, 254, 255], 300)
        changed = bins.update(ids)
        assert changed.tolist() == sorted({i // 3 for i in ids})
        anew = Bins(columns)
        anew.update(range(5000))
        for mine, theirs in zip(bins.columns(), anew.columns(), strict=True):
            assert mine.tolist() == theirs.tolist()
    for number in range(1667):
        part = slice(3 * number, 3 * number + 3)
        used, kept, slot, flags = (int(column[number]) for column in bins.columns())
        state = columns["state"][part]
        assert used == sum(state & 15 == 1)
        assert kept == sum(state & 15 == 2)
        assert bool(flags & 0x10) == any(state & 0x10)
        assert bool(flags & 0x80) == any(columns["ref"][part] > 1)
        owned = [s for s in columns["slot"][part] if s != 255]
        assert slot == 255 if not owned else owned.count(slot) == max(map(owned.count, owned))


def test_hostile_text_goes_through_and_is_only_made_shorter():
    hostile = "</script><img src=x onerror=alert(1)>\u202e\x00" + "x" * 500
    view = plain_view(64)
    arrive(view, 1, prompt=hostile)
    row = PictureEncoder(view).full("live").header["rows"][0]
    assert row["prompt_text"] == hostile[-120:]

    view = plain_view(64)
    arrive(view, 1, prompt=hostile[:60])
    row = PictureEncoder(view).full("live").header["rows"][0]
    assert row["prompt_text"] == hostile[:60]


def test_long_output_and_long_block_texts_are_cut():
    view = plain_view(64)
    arrive(view, 1, prompt="p" * 50)
    begin(view)
    encoder, mirror = PictureEncoder(view), Mirror()
    mirror.apply_message(encoder.full("live"))
    for number in range(3):
        text = str(number) * (3000 if number < 2 else 5000)
        view.apply(
            RequestOutput(step=1, request_id="r0", outputs=(CompletionOutput(0, text, (7,)),))
        )
        mirror.apply_message(encoder.delta("live"))
    fresh = PictureEncoder(view).full("live").header

    assert view.block_text(1) == "p" * 50
    assert mirror.cells[1][2] == "p" * 40
    assert mirror.rows["r0"]["text"] == fresh["rows"][0]["text"] == "2" * 4000


def begin(view, request_id="r0", tokens=2, step=1, blocks=None):
    """Admit a request that arrived with two prompt tokens."""
    blocks = (step,) if blocks is None else tuple(blocks)
    new = NewRequestData(request_id, (1, 2), SamplingParams(), (blocks,), 0)
    view.apply(
        SchedulerOutput(
            step=step,
            scheduled_new_reqs=(new,),
            num_scheduled_tokens={request_id: tokens},
            kv_events=tuple(BlockAllocated(block, request_id) for block in blocks),
        )
    )


def say(view, text, *token_ids, step, time, logprobs=None):
    completion = CompletionOutput(0, text, token_ids, logprobs=logprobs)
    view.apply(RequestOutput(step=step, time=time, request_id="r0", outputs=(completion,)))


def tokens_of(frame):
    (row,) = frame.header["rows"]
    return row.get("tokens")


def test_a_token_says_its_length_step_and_latency():
    view = plain_view(64)
    arrive(view, 1)
    begin(view)
    encoder = PictureEncoder(view)
    encoder.full("live")
    say(view, "a\U0001f600", 7, step=1, time=0.25)
    say(view, "bc", 8, 9, step=2, time=0.2504)

    # lengths in UTF-16; of two tokens of one step the text is the last one's
    expected = [[3, 1, 250.0], [0, 2, 0.4], [2, 2, 0.0]]
    assert tokens_of(encoder.delta("live")) == expected
    assert tokens_of(PictureEncoder(view).full("live")) == expected


def test_chances_and_alternatives_come_from_the_logprobs_that_were_asked_for():
    view = plain_view(64)
    arrive(view, 1)
    begin(view)
    encoder = PictureEncoder(view)
    encoder.full("live")
    chances = {
        7: Logprob(math.log(0.5), 1, " yes"),
        8: Logprob(math.log(0.1), 3, "\ud800</b>"),
        9: Logprob(math.log(0.25), 2),
        **{i: Logprob(-9.0 - i, i, "x" * 99) for i in range(10, 20)},
        20: Logprob(float("-inf"), 99, "never"),
    }
    say(view, " yes", 7, step=1, time=0.1, logprobs=(chances,))

    (token,) = tokens_of(encoder.delta("live"))
    assert token[:4] == [4, 1, 100.0, 0.5]
    assert token[4][:2] == [["#9", 0.25], ["?</b>", 0.1]]
    assert [len(text) for text, _ in token[4]] == [2, 5, 24, 24]


def test_a_token_after_a_preemption_says_how_many_steps_it_cost(tiny_engine):
    engine = tiny_engine(num_blocks=8, block_size=2, seed=1)
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    for _ in range(3):
        engine.add("abcd", max_tokens=6)
    engine.run()
    stalled = 0
    for row in PictureEncoder(view).full("finished").header["rows"]:
        steps = [token[1] for token in row["tokens"]]
        for before, token in zip(steps, row["tokens"][1:], strict=False):
            stall = token[5] if len(token) > 5 else 0
            assert stall in (0, token[1] - before - 1)
            stalled += stall > 0

    assert view.totals.preemptions
    assert stalled


def test_what_came_before_the_view_has_a_text_but_no_tokens(tiny_engine):
    engine = tiny_engine()
    engine.add("abc", max_tokens=9)
    for _ in range(4):
        engine.step()
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    encoder = PictureEncoder(view)
    assert tokens_of(encoder.full("live")) is None
    engine.step()

    assert [token[1] for token in tokens_of(encoder.delta("live"))] == [5]
    assert len(view.requests["r1"].text) == 5


def test_what_a_request_did_is_told_once(tiny_engine):
    engine = tiny_engine(num_blocks=60, budget=4)
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    encoder = PictureEncoder(view)
    encoder.full("ready")
    engine.add("abcabc", max_tokens=5)
    told = []
    for _ in range(6):
        engine.step()
        told.append(encoder.delta("live").header["rows"][0].get("did"))

    assert told == [[[1, 1, "p", 4]], [[1, 1, "p", 4], [2, 1, "p", 2]], *[ANY] * 4]
    # that it goes on decoding is the rule, and not told
    assert told[2][-1] == [3, 1, "d", 1]
    assert told[3:5] == [None, None]


def test_a_late_reader_gets_the_steps_before_it(tiny_engine):
    engine = tiny_engine(num_blocks=60)
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    engine.add("abcabc", max_tokens=9)
    engine.run()
    header = PictureEncoder(view).full("finished").header

    assert [entry[:2] for entry in header["log"]] == [[n, n] for n in range(view.step)]
    assert [entry[2] for entry in header["log"]] == sorted(entry[2] for entry in header["log"])
    scheduled = 3 + LOG_NAMES.index("scheduled")
    assert [entry[scheduled] for entry in header["log"]] == [0, 6, *[1] * (view.step - 2)]
    assert header["rows"][0]["did"] == [[1, 1, "p", 6], [2, 8, "d", 1]]


def test_a_page_is_told_no_log(tiny_engine):
    engine = tiny_engine(num_blocks=60)
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    encoder = PictureEncoder(view, has_log=False)
    engine.add("abcabc", max_tokens=9)
    engine.run()

    assert "log" not in encoder.full("replay").header


def test_the_struct_is_sent_when_it_is_another_one(tiny_engine):
    engine = tiny_engine()
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    encoder = PictureEncoder(view)
    assert encoder.full("ready").header["struct"] is None
    engine.add("abc")
    header = encoder.delta("live").header
    assert header["struct"]["kind"] == "EngineCoreRequest"
    assert (header["at"], header["boundary"]) == (0, "EngineCoreRequest")
    assert "struct" not in encoder.delta("live").header
    engine.step()

    assert encoder.delta("live").header["struct"]["kind"] == "RequestOutput"


def test_half_a_character_does_not_break_the_message():
    view = plain_view(64)
    arrive(view, 1, prompt="a\ud800b")
    header = PictureEncoder(view).full("live").header

    assert header["rows"][0]["prompt_text"] == "a?b"
    json.dumps(header, ensure_ascii=False).encode("utf-8")


def test_a_frame_does_not_change_with_the_view(tiny_engine):
    engine = tiny_engine()
    snapshot, _ = engine.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    encoder = PictureEncoder(view)
    frame = encoder.full("ready")
    before = json.dumps(frame.to_page())
    engine.add("abc")
    engine.run()
    encoder.delta("live")

    assert json.dumps(frame.to_page()) == before
