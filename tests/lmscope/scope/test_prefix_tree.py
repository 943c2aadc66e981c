"""The tree of prefixes: every block of a reader is in it once, and it stays true step by step."""

from __future__ import annotations

import random

import pytest

from lmscope.boundary import (
    BlockAllocated,
    BlockFreed,
    BlockStored,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    NewRequestData,
    SchedulerOutput,
)
from lmscope.sampling_params import SamplingParams
from lmscope.scope import prefix_tree
from lmscope.scope.picture_tree import SentTree
from lmscope.scope.prefix_tree import PrefixTree
from lmscope.scope.view import EngineView


class Follower:
    """A view and its tree, kept up with an engine."""

    def __init__(self, engine):
        snapshot, _ = engine.tap.follow(lambda boundary: self.view.apply(boundary), strict=True)
        self.view = EngineView(snapshot)
        self.changes = self.view.track()
        self.tree = PrefixTree(self.view)
        self.tree.update(block.block_id for block in self.view.blocks.not_empty())

    def keep_up(self):
        self.tree.update(self.changes.blocks)
        self.changes.clear()
        return self.tree.nodes()


def fresh(view):
    tree = PrefixTree(view)
    tree.update(block.block_id for block in view.blocks.not_empty())
    return tree


def known(nodes):
    """Nodes without their ids, which tell only how old they are, and without their text.

    What was kept may have a text that nobody could tell any more.
    """
    names = {-1: ()}
    for node in nodes.values():
        names[node.node_id] = (
            names[node.parent],
            node.start,
            node.count,
            node.readers,
            node.kept_by,
        )
    return sorted(names.values(), key=repr)


@pytest.mark.parametrize("seed", range(5))
def test_kept_up_it_is_the_same_as_made_anew(tiny_engine, random_life, seed):
    engine = tiny_engine(num_blocks=60, block_size=2, seed=seed, max_num_seqs=6)
    follower = Follower(engine)
    life, rng = random_life(engine, seed), random.Random(seed)
    branched = 0
    for _ in range(200):
        life.act()
        if rng.random() < 0.7:
            nodes = follower.keep_up()
            assert known(nodes) == known(fresh(follower.view).nodes())
            branched += len(nodes) > 6

    assert branched > 20


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_finds_all_its_blocks_and_their_text_from_the_root(tiny_engine, random_life, seed):
    engine = tiny_engine(num_blocks=60, block_size=2, seed=seed, max_num_seqs=6)
    follower = Follower(engine)
    life = random_life(engine, seed)
    for _ in range(150):
        life.act()
        nodes, view = follower.keep_up(), follower.view
        for node in nodes.values():
            assert node.parent == -1 or list(nodes).index(node.parent) < list(nodes).index(
                node.node_id
            )
            if node.parent >= 0:
                parent = nodes[node.parent]
                assert node.start == parent.start + parent.count
                assert set(node.readers) <= set(parent.readers)
        for request_id in view.holding:
            mine = [node for node in nodes.values() if request_id in node.readers]
            assert sum(node.count for node in mine) == len(view.requests[request_id].block_ids)
            whole = "".join(view.block_text(i) for i in view.requests[request_id].block_ids)
            if mine and whole:
                assert whole.startswith(mine[0].text[:96])
        kept = {b.block_hash for b in view.blocks.not_empty() if not b.owners}
        in_use = {b.block_hash for b in view.blocks.not_empty() if b.owners}
        num_kept = sum(node.count for node in nodes.values() if not node.readers)
        assert num_kept == len(kept - in_use)


def run_to_the_end(tiny_engine, *prompts, **settings):
    engine = tiny_engine(block_size=2, num_blocks=60, max_num_seqs=8, **settings)
    follower = Follower(engine)
    for prompt in prompts:
        engine.add(prompt, max_tokens=1)
        engine.run()
    return engine, follower


def drawn(nodes):
    return [
        (node.parent, node.start, node.count, node.text, node.readers, node.kept_by)
        for node in nodes.values()
    ]


def test_a_shared_prefix_is_one_run_with_all_its_readers(tiny_engine):
    engine = tiny_engine(block_size=2, num_blocks=60, budget=64)
    follower = Follower(engine)
    for prompt in ("abcabcxy", "abcabczz", "abcabc"):
        engine.add(prompt, max_tokens=9)
        engine.step()
    nodes = follower.keep_up()
    texts = {node.text[:6]: node for node in nodes.values()}

    root = texts["abcabc"]
    assert (root.start, root.count, root.readers, root.kept_by) == (0, 3, ("r1", "r2", "r3"), None)
    assert [node.start for node in nodes.values() if node.parent == root.node_id] == [3, 3]


def test_what_is_kept_names_who_stored_it(tiny_engine):
    _, follower = run_to_the_end(tiny_engine, "abcdef", "abxy")
    assert drawn(follower.keep_up()) == [
        (-1, 0, 1, "ab", (), "r1"),
        (0, 1, 1, "xy", (), "r2"),
        (0, 1, 2, "cdef", (), "r1"),
    ]


def test_it_says_what_was_hit_by_whom_in_this_step(tiny_engine):
    engine, follower = run_to_the_end(tiny_engine, "abcdef")
    engine.add("abcdxx", max_tokens=3)
    engine.step()
    nodes = follower.keep_up()
    (hit,) = follower.tree.hits().items()

    assert hit[1] == {"r2": 2}
    assert nodes[hit[0]].text == "abcd"
    engine.step()
    follower.keep_up()
    assert follower.tree.hits() == {}


def test_it_says_what_a_waiting_request_would_reuse(tiny_engine):
    engine, follower = run_to_the_end(tiny_engine, "abcdef")
    for prompt in ("abcdxx", "xx", "abcdef"):
        engine.add(prompt)
    nodes = follower.keep_up()
    waiting = follower.tree.waiting()

    assert [(i, count) for i, _, count in waiting] == [("r2", 2), ("r3", 0), ("r4", 2)]
    assert waiting[1][1] == -1
    assert nodes[waiting[0][1]].text.startswith("abcd")
    before = follower.view.totals.hits
    engine.step()
    assert follower.view.totals.hits - before == sum(count for _, _, count in waiting)


def plain_view(block_size=2, num_blocks=400):
    info = EngineInfo(
        model="m",
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=200,
        max_num_batched_tokens=4096,
        max_model_len=4096,
    )
    return EngineView(EngineSnapshot(info=info, free_queue=range(1, num_blocks)))


def admit(view, name, blocks, step, salt=None):
    """A request whose blocks are (block id, hash, parent hash, tokens)."""
    tokens = sum((block[3] for block in blocks), ())
    params = SamplingParams()
    view.apply(
        EngineCoreRequest(
            request_id=name, prompt_token_ids=tokens, sampling_params=params, cache_salt=salt
        )
    )
    events = [BlockAllocated(block[0], name) for block in blocks]
    events += [
        BlockStored(block_id, name, block_hash, parent, told, index)
        for index, (block_id, block_hash, parent, told) in enumerate(blocks)
    ]
    ids = tuple(block[0] for block in blocks)
    view.apply(
        SchedulerOutput(
            step=step,
            scheduled_new_reqs=(NewRequestData(name, tokens, params, (ids,), 0),),
            num_scheduled_tokens={name: len(tokens)},
            kv_events=tuple(events),
        )
    )


def test_the_same_tokens_under_another_salt_are_not_reused():
    view = plain_view()
    admit(view, "mine", [(1, 11, None, (1, 2)), (2, 12, 11, (3, 4))], step=1, salt="a")
    for number, salt in enumerate(["a", "b", None]):
        view.apply(
            EngineCoreRequest(
                request_id=f"w{number}",
                prompt_token_ids=(1, 2, 3, 4, 5),
                sampling_params=SamplingParams(),
                cache_salt=salt,
            )
        )

    assert [count for _, _, count in fresh(view).waiting()] == [2, 0, 0]


def test_two_blocks_with_the_same_content_are_one_run_until_both_are_gone():
    view = plain_view()
    admit(view, "a", [(1, 11, None, (1, 2))], step=1)
    admit(view, "b", [(2, 11, None, (1, 2))], step=2)
    tree = fresh(view)
    (node,) = tree.nodes().values()
    assert (node.count, node.readers) == (1, ("a", "b"))
    view.apply(SchedulerOutput(step=3, finished_req_ids=("a",), kv_events=(BlockFreed(1, "a"),)))
    tree.update([1])
    (node,) = tree.nodes().values()
    assert node.readers == ("b",)


def test_kept_text_whose_beginning_is_gone_stands_at_its_place(tiny_engine):
    view = plain_view()
    admit(view, "a", [(1, 11, None, (1, 2)), (2, 12, 11, (3, 4))], step=1)
    view.apply(
        SchedulerOutput(
            step=2,
            finished_req_ids=("a",),
            kv_events=(BlockFreed(2, "a"), BlockFreed(1, "a"), BlockAllocated(1, "b")),
        )
    )
    (node,) = fresh(view).nodes().values()

    assert (node.parent, node.start, node.kept_by) == (-1, 1, "a")


def test_it_is_cut_where_there_is_too_much_and_says_so(monkeypatch):
    view = plain_view(num_blocks=1000)
    for number in range(100):
        first = 1 + 3 * number
        blocks = [(first + k, 10 * first + k, 10 * first + k - 1 if k else None, (number, k))
                  for k in range(3)]  # fmt: skip
        admit(view, f"r{number}", blocks, step=number + 1)
    tree = fresh(view)
    assert len(tree.nodes()) == 64
    assert tree.note == "the tree is cut: 36 more run"

    ids = [f"r{number}" for number in range(100)]
    freed = [BlockFreed(1 + 3 * n + k, f"r{n}") for n in range(100) for k in (2, 1, 0)]
    view.apply(SchedulerOutput(step=101, finished_req_ids=tuple(ids), kv_events=tuple(freed)))
    tree = fresh(view)
    nodes = tree.nodes()
    assert [node.kept_by for node in nodes.values()] == [f"r{n}" for n in range(99, 19, -1)]
    assert tree.note == "the tree is cut: older kept text is left out"

    monkeypatch.setattr(prefix_tree, "_MOST_NODES", 10)
    tree = fresh(view)
    assert len(tree.nodes()) == 10
    assert tree.note.endswith("it ends at 10 runs")


def test_a_reader_gets_only_what_changed(tiny_engine):
    engine = tiny_engine(block_size=2, num_blocks=60)
    follower = Follower(engine)
    sent = SentTree(follower.view)
    assert sent.whole() == {"nodes": []}
    engine.add("abcab", max_tokens=9)
    assert sent.changed() == {"nodes": [], "waiting": [["r1", -1, 0]]}
    engine.step()
    sent.update(follower.changes.blocks)
    assert [node[:5] for node in sent.changed()["nodes"]] == [[0, -1, 0, 3, "abcab"]]
    follower.changes.clear()
    texts = []
    for _ in range(4):
        engine.step()
        sent.update(follower.changes.blocks)
        follower.changes.clear()
        texts.append(sent.changed())
    assert all(len(change["nodes"]) <= 1 for change in texts)
    assert sent.changed() is None
    assert len(sent.whole()["nodes"]) == 1
