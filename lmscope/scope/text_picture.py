"""The picture in characters, one per block: for terminals, diffs and other readers of text.

lmscope  step 22/37   42/49 blocks used, 9 shared, 7 kept   4 running, 0 waiting
blocks   #+++++++++EFHGEFFHGGGHGGFEdddddddHGEEEEEGHGEFFFFFF
         # null  + shared  A in use  a kept      D r2  E r3  F r4  G r5  H r6
r6       prefill: 9 tokens, 18 came from the cache
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from textwrap import wrap

from lmscope.scope.attention_words import most_attended, percent
from lmscope.scope.pool_view import BlockView
from lmscope.scope.prefix_tree import PrefixTree
from lmscope.scope.request_view import OwnerSlots
from lmscope.scope.run_log import LOG_NAMES, step_stat
from lmscope.scope.struct_tree import standing
from lmscope.scope.view import EngineView
from lmscope.scope.visible import visible

__all__ = ["text_picture"]

_NAME_WIDTH = 9
# More blocks than this are drawn several to a character.
_MAX_CHARACTERS = 1024
_MAX_LINES = 8
_MAX_ID = 40
_MAX_TEXT = 240
_MAX_NODES = 24
_NULL, _SHARED, _EMPTY, _NEUTRAL = "#", "+", ".", "?"
# By attention: a block with content that no request of the step reads.
_HELD = "-"
# How much of the budget a step spent, from nothing to all of it.
_SHARES = " .:-=+*#%@"


def text_picture(
    view: EngineView,
    *,
    last_step: int | None = None,
    lit: Sequence[str] = (),
    width: int = 100,
    views: Collection[str] | None = None,
    colour: str = "owner",
    in_flight: str = "",
) -> str:
    """Header, block map, legend and a line with the reason of some requests.

    last_step   of the run, when `view` is a moment within it
    lit         the requests to give the reason of; else those that live, else the last
                that ended
    width       of a line; characters, at least 40
    views       only what these views show, under the header: of timeline, blocks, tree,
                tokens, requests and debugger; None: the blocks and the requests
    colour      "attention": a block's character says how much of the last step's attention
                it gets, not whose it is; as long as somebody measures it
    in_flight   what the device has still to tell an engine that stands, in a sentence
    """
    width = max(40, width)
    shown = ("blocks", "requests") if views is None else views
    lines = [_header(view, last_step)]
    if in_flight:
        lines += _named("stands", wrap(in_flight, width - _NAME_WIDTH))
    if "timeline" in shown and views is not None:
        lines += _steps(view, width - _NAME_WIDTH)
    if "blocks" in shown:
        if colour == "attention":
            lines += _attention(view, width - _NAME_WIDTH)
        else:
            lines += _map(view, width - _NAME_WIDTH)
    if "tree" in shown:
        lines += _named("tree", _tree(view, width - _NAME_WIDTH))
    if "requests" in shown:
        lines += _reasons(view, lit, width)
    if "tokens" in shown:
        for request_id in _chosen(view):
            text = " ".join(visible(view.requests[request_id].text[-_MAX_TEXT:]).split())
            lines += _paragraph(_short(request_id), text, width)
    if "debugger" in shown:
        lines += _named("stands", wrap(standing(view), width - _NAME_WIDTH))
    return "\n".join(line.rstrip() for line in lines)


def _reasons(view: EngineView, lit: Sequence[str], width: int) -> list[str]:
    wanted = [i for i in lit if i in view.requests] if lit else _chosen(view)
    sentences = view.sentences(wanted)
    lines: list[str] = []
    for request_id in wanted:
        lines += _paragraph(_short(request_id), sentences[request_id], width)
    rest = view.num_running + view.num_waiting - len(wanted)
    if not lit and rest > 0:
        lines.append(" " * _NAME_WIDTH + f"{rest} more")
    return lines


def _header(view: EngineView, last_step: int | None) -> str:
    totals = view.totals
    parts = [
        "lmscope  step " + (f"{view.step}" if last_step is None else f"{view.step}/{last_step}"),
        f"{view.num_used}/{view.info.num_blocks - 1} blocks used, "
        f"{view.num_shared} shared, {view.num_kept} kept",
        f"{view.num_running} running, {view.num_waiting} waiting",
    ]
    if totals.prompt_tokens:
        share = 100 * totals.cached_tokens / totals.prompt_tokens
        parts.append(f"{share:.0f} % from cache")
    if totals.preemptions:
        plural = "" if totals.preemptions == 1 else "s"
        parts.append(f"{totals.preemptions} preemption{plural}")
    return "   ".join(parts)


def _steps(view: EngineView, width: int) -> list[str]:
    """The steps that there is room for, each with its share of the token budget."""
    scheduled = LOG_NAMES.index("scheduled")
    budget = view.info.max_num_batched_tokens
    tokens = [*(int(record.counts[scheduled]) for record in view.log.records)]
    tokens.append(step_stat(view)["scheduled"])
    most = len(_SHARES) - 1
    marks = "".join(_SHARES[min(most, -(-count * most // budget))] for count in tokens[-width:])
    words = f"tokens of a step, of {budget}: {_SHARES[1]} few, {_SHARES[-1]} all"
    return _named("steps", [marks, words])


def _tree(view: EngineView, width: int) -> list[str]:
    """The prefix tree as an outline: which tokens, how many readers, the text."""
    tree = PrefixTree(view)
    nodes, size = tree.nodes(), view.info.block_size
    below: dict[int, list[int]] = {}
    for node_id, node in nodes.items():
        below.setdefault(node.parent, []).append(node_id)
    lines: list[str] = []
    # The deepest tree has one branch below another, so a stack and no recursion.
    left = [(node_id, 0) for node_id in reversed(below.get(-1, ()))]
    while left and len(lines) < _MAX_NODES:
        node_id, depth = left.pop()
        node = nodes[node_id]
        text = " ".join(visible(node.text).split())
        names = ", ".join(map(_short, node.readers[:_MAX_LINES])) or "kept, no reader"
        line = f"{'  ' * min(depth, 8)}{node.count * size} tokens ({names}): {text}"
        lines.append(line if len(line) <= width else line[: width - 1] + "…")
        left += [(child, depth + 1) for child in reversed(below.get(node_id, ()))]
    return [*lines, f"{len(nodes) - len(lines)} more"] if left else lines or ["no prefixes yet"]


def _map(view: EngineView, width: int) -> list[str]:
    """The block map and its legend, which names only the marks that are drawn."""
    num_blocks = view.info.num_blocks
    per_character = -(-num_blocks // _MAX_CHARACTERS)
    marks = "".join(_marks(view, num_blocks, per_character))
    lines = _named("blocks", [marks[i : i + width] for i in range(0, len(marks), width)])
    legend = [
        f"{mark} {word}"
        for mark, word in ((_NULL, "null"), (_SHARED, "shared"), (_EMPTY, "empty"))
        if mark in marks
    ]
    if any(mark.isupper() for mark in marks):
        legend.append("A in use")
    if any(mark.islower() for mark in marks):
        legend.append("a kept")
    if _NEUTRAL in marks:
        legend.append(f"{_NEUTRAL} of another")
    if per_character > 1:
        legend.append(f"1 character = {per_character} blocks, what most are")
    drawn = {mark.upper() for mark in marks if mark.isalpha()}
    names = {
        _letter(request.slot): request_id
        for request_id, request in view.requests.items()
        if request.slot < OwnerSlots.NUM_SLOTS
    }
    legend += [f"{mark} {_short(names[mark])}" for mark in sorted(drawn & names.keys())]
    return lines + _named("", _packed(legend, width))


def _attention(view: EngineView, width: int) -> list[str]:
    """The block map by attention, and the blocks that get most; by owner where there is none."""
    if not view.attention:
        return [*_map(view, width), *_named("", ["attention was not measured in this step"])]
    num_blocks = view.info.num_blocks
    per_character = -(-num_blocks // _MAX_CHARACTERS)
    top = max(view.attention.values())
    drawn = [_EMPTY] * -(-num_blocks // per_character)
    for block in view.blocks.not_empty():
        place = block.block_id // per_character
        if drawn[place] == _EMPTY:
            drawn[place] = _HELD
    highest: dict[int, float] = {}
    for block_id, share in view.attention.items():
        place = block_id // per_character
        highest[place] = max(share, highest.get(place, 0.0))
    for place, share in highest.items():
        # Small shares are to be seen beside the one that takes half.
        drawn[place] = str(round(9 * math.sqrt(share / top)))
    if per_character == 1:
        drawn[0] = _NULL
    marks = "".join(drawn)
    legend = [f"0 to 9: next to none to {percent(top)} of the step's attention"]
    legend += [
        f"{mark} {word}"
        for mark, word in ((_NULL, "null"), (_HELD, "not attended to"), (_EMPTY, "empty"))
        if mark in marks
    ]
    if per_character > 1:
        legend.append(f"1 character = {per_character} blocks, their largest share")
    most = ", ".join(
        f"block {block_id} {percent(share)} ({', '.join(map(_short, owners)) or 'nobody'})"
        for block_id, share, owners in most_attended(view)
    )
    lines = _named("blocks", [marks[i : i + width] for i in range(0, len(marks), width)])
    return lines + _named("", _packed(legend, width)) + _named("most", wrap(most, width))


def _marks(view: EngineView, num_blocks: int, per_character: int) -> Iterator[str]:
    """One character for each `per_character` blocks: what most of them are."""
    found: dict[int, Counter[str]] = {}
    for block in view.blocks.not_empty():
        inside = found.setdefault(block.block_id // per_character, Counter())
        inside[_mark(view, block)] += 1
    if per_character == 1:
        found[0] = Counter(_NULL)
    for place in range(-(-num_blocks // per_character)):
        inside = found.get(place, Counter())
        inside[_EMPTY] = min(per_character, num_blocks - place * per_character) - inside.total()
        yield max(inside, key=inside.__getitem__)


def _mark(view: EngineView, block: BlockView) -> str:
    if block.ref_cnt > 1:
        return _SHARED
    slot = view.block_slot(block)
    if slot >= OwnerSlots.NUM_SLOTS:
        return _NEUTRAL
    return _letter(slot) if block.owners else _letter(slot).lower()


def _letter(slot: int) -> str:
    return chr(ord("A") + slot)


def _chosen(view: EngineView) -> list[str]:
    """The requests whose reason is told: those that live, else the last that ended."""
    live = list(islice((*view.running, *view.waiting), _MAX_LINES))
    return live or list(islice(view.newest_finished(), _MAX_LINES))[::-1]


def _paragraph(name: str, text: str, width: int) -> list[str]:
    """A name and a text that wraps beside it; reasons are never cut."""
    lines = wrap(text, width - _NAME_WIDTH) or [""]
    if len(name) >= _NAME_WIDTH:
        return [name, *_named("", lines)]
    return _named(name, lines)


def _named(name: str, lines: Iterable[str]) -> list[str]:
    return [
        (name if place == 0 else "").ljust(_NAME_WIDTH) + line for place, line in enumerate(lines)
    ]


def _packed(words: Iterable[str], width: int) -> list[str]:
    """Words in lines of at most `width`, two spaces apart."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += "  " + word
        else:
            lines.append(word)
    return lines


def _short(text: str) -> str:
    return text if len(text) <= _MAX_ID else text[: _MAX_ID - 1] + "…"
