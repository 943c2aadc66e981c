import assert from "node:assert/strict";
import { test } from "node:test";
import { columnsFromBuffers, columnsFromLists } from "../src/core/columns.js";
import { Picture } from "../src/core/picture.js";
import {
  binned,
  buffers,
  columns,
  delta,
  EMPTY_BLOCK,
  full,
  NULL_BLOCK,
  pictureOf,
  randomRun,
  row,
} from "./frames.js";

function contents(picture) {
  const { step, stat, next, rows, cells, slot, state, ref, fill, info } = picture;
  return {
    ...{ step, stat, next, info, rows: [...rows.values()].sort((a, b) => (a.id < b.id ? -1 : 1)) },
    cells: [...cells.values()].sort((a, b) => a[0] - b[0]),
    columns: [slot, state, ref, fill].map((column) => [...column]),
  };
}

test("deltas lead to the same picture as the full frame, in many runs by chance", () => {
  for (let seed = 1; seed <= 50; seed++) {
    const { fulls, deltas } = randomRun(seed);
    const folded = new Picture();
    deltas.forEach((frame, k) => {
      assert.equal(folded.apply(frame, columns(frame)), "applied");
      assert.deepEqual(
        contents(folded),
        contents(pictureOf({ ...fulls[k], seq: 0 })),
        `seed ${seed}, step ${k}`,
      );
    });
  }
});

test("a missing frame is a gap and changes nothing, a full frame mends it", () => {
  const { fulls, deltas } = randomRun(3);
  const picture = pictureOf(deltas[0], deltas[1]);
  const before = contents(picture);
  assert.equal(picture.apply(deltas[3], columns(deltas[3])), "gap");
  assert.deepEqual(contents(picture), before);
  assert.equal(picture.apply(fulls[3], columns(fulls[3])), "applied");
  assert.equal(picture.apply(deltas[4], columns(deltas[4])), "applied");
  assert.deepEqual(contents(picture), contents(pictureOf({ ...fulls[4], seq: 0 })));
});

test("frames of an older epoch and frames seen before are dropped", () => {
  const picture = pictureOf(full([NULL_BLOCK, EMPTY_BLOCK], { epoch: 2, seq: 5 }));
  assert.equal(
    picture.apply(full([NULL_BLOCK], { epoch: 1, seq: 9 }), columns(full([NULL_BLOCK]))),
    "old",
  );
  assert.equal(picture.apply(delta([], { epoch: 2, seq: 5 }), columns(delta([]))), "old");
  assert.equal(picture.numBlocks, 2);
});

test("a delta of a new epoch needs a full frame first", () => {
  const picture = pictureOf(full([NULL_BLOCK]));
  assert.equal(picture.apply(delta([], { epoch: 2, seq: 1 }), columns(delta([]))), "gap");
});

test("buffers at odd places read as the lists do", () => {
  const frame = delta([
    [1, 7, 0x41, 2, 3],
    [300, 1, 2, 0, 4],
  ]);
  assert.deepEqual(columnsFromBuffers(frame, buffers(frame)), columnsFromLists(frame));
  const whole = full([NULL_BLOCK, [3, 1, 1, 4]]);
  assert.deepEqual(columnsFromBuffers(whole, buffers(whole)).fill, Uint8Array.of(0, 4));
});

test("frames that contradict themselves are refused", () => {
  const whole = full([NULL_BLOCK, EMPTY_BLOCK]);
  const picture = pictureOf(whole);
  assert.throws(() => columnsFromBuffers(whole, buffers(whole).slice(1)), /carries 4 buffers/);
  const short = { ...columns(whole), fill: Uint8Array.of(0) };
  assert.throws(() => picture.apply({ ...whole, seq: 1 }, short), /column fill has 1 entries/);
  const outside = delta([[9, 0, 1, 1, 1]]);
  assert.throws(() => picture.apply(outside, columns(outside)), /block 9, the pool has 2/);
  assert.throws(() => picture.apply({ ...whole, v: 2 }, columns(whole)), /version 2/);
});

test("a block that goes on was written from its old fill, a new one from its start", () => {
  const picture = pictureOf(
    full([NULL_BLOCK, [0, 1, 1, 2], [1, 2, 0, 4], EMPTY_BLOCK]),
    delta([
      [1, 0, 0x41, 1, 3],
      [2, 0, 0x61, 1, 1],
      [3, 0, 0x41, 1, 2],
    ]),
  );
  assert.deepEqual([...picture.writtenFrom], [0, 2, 0, 0]);
});

test("a full frame that follows keeps what was written in the step", () => {
  const picture = pictureOf(
    full([NULL_BLOCK, [0, 1, 1, 2]]),
    full([NULL_BLOCK, [0, 0x41, 1, 3]], { seq: 1, step: 1 }),
  );
  assert.equal(picture.writtenFrom[1], 2);
});

test("text is appended, at most 4,000 characters are kept, and none is cut in half", () => {
  const picture = pictureOf(full([NULL_BLOCK], { rows: [row("a", { text: "x" })] }));
  const more = delta([], { rows: [{ id: "a", add: "yz" }] });
  picture.apply(more, columns(more));
  assert.equal(picture.rows.get("a").text, "xyz");
  const long = delta([], { seq: 2, rows: [{ id: "a", add: "\u{1f600}".repeat(2000) + "z" }] });
  picture.apply(long, columns(long));
  const { text } = picture.rows.get("a");
  assert.equal(text.length, 3999);
  assert.equal(text.codePointAt(0), 0x1f600);
});

test("changes name the blocks of a delta and those that were or are next", () => {
  const picture = pictureOf(
    full([NULL_BLOCK, EMPTY_BLOCK, EMPTY_BLOCK, EMPTY_BLOCK], { next: [1, 2] }),
  );
  const [tracker, other] = [picture.track(), picture.track()];
  assert.equal(tracker.take().all, true);
  const frame = delta([[3, 0, 1, 1, 1]], { next: [2], rows: [row("a")] });
  picture.apply(frame, columns(frame));
  const changes = tracker.take();
  assert.deepEqual([...changes.blocks].sort(), [1, 2, 3]);
  assert.deepEqual([...changes.rows], ["a"]);
  assert.equal(changes.list, true);
  assert.equal(tracker.take().blocks.size, 0);
  assert.equal(other.take().blocks.size, 3);
  other.end();
  assert.equal(picture.trackers.size, 1);
});

test("a block that became empty loses its words", () => {
  const picture = pictureOf(
    full([NULL_BLOCK, [0, 1, 1, 4]], { cells: [[1, ["a"], "hello", null, null, null]] }),
  );
  const frame = delta([[1, 255, 0, 0, 0]]);
  picture.apply(frame, columns(frame));
  assert.deepEqual(picture.ownersOf(1), []);
  assert.equal(picture.cells.size, 0);
});

test("tokens share the text, and what was held back belongs to the token before", () => {
  const tokens = [
    [2, 1, 30.5],
    [3, 2, 4, 0.25, [["x", 0.5]], 2],
  ];
  const picture = pictureOf(full([NULL_BLOCK], { rows: [row("a", { text: "old, yes", tokens })] }));
  const { tokens: first } = picture.rows.get("a");
  assert.deepEqual(first, [
    { text: ", ", step: 1, ms: 30.5, chance: null, others: null, stall: 0 },
    { text: "yes", step: 2, ms: 4, chance: 0.25, others: [["x", 0.5]], stall: 2 },
  ]);
  const more = delta([], { step: 3, rows: [{ id: "a", add: "! so", tokens: [[3, 3, 1]] }] });
  picture.apply(more, columns(more));
  const row3 = picture.rows.get("a");
  assert.deepEqual(
    row3.tokens.map((token) => token.text),
    [", ", "yes!", " so"],
  );
  assert.equal(row3.text, "old, yes! so");
  assert.equal(first.length, 2, "what a kept picture shows does not change");
});

test("at most 512 tokens are kept", () => {
  const picture = pictureOf(full([NULL_BLOCK], { rows: [row("a", { text: "" })] }));
  for (let k = 1; k <= 600; k++) {
    const more = delta([], { seq: k, step: k, rows: [{ id: "a", add: "x", tokens: [[1, k, 1]] }] });
    picture.apply(more, columns(more));
  }
  const { tokens } = picture.rows.get("a");
  assert.deepEqual([tokens.length, tokens[0].step, tokens[511].step], [512, 89, 600]);
});

test("what a request does goes on without being told, as long as it computes", () => {
  const did = [
    [1, 1, "p", 8],
    [2, 1, "d", 1],
  ];
  const picture = pictureOf(full([NULL_BLOCK], { step: 2, rows: [row("a", { did })] }));
  let seq = 0;
  const after = (step, more) => {
    const frame = delta([], { seq: ++seq, step, rows: [{ id: "a", ...more }] });
    picture.apply(frame, columns(frame));
    return picture.rows.get("a").did.at(-1);
  };
  assert.deepEqual(after(5, { computed: 12 }), [2, 4, "d", 1]);
  assert.deepEqual(after(6, { why: "waiting" }), [2, 4, "d", 1]);
  assert.deepEqual(after(7, { computed: 0, did: [[7, 0, "x", 0]] }), [7, 0, "x", 0]);
  assert.deepEqual(after(8, { computed: 3 }), [7, 0, "x", 0]);
  assert.deepEqual(
    after(8, {
      did: [
        [7, 0, "x", 0],
        [8, 1, "r", 3],
      ],
    }),
    [8, 1, "r", 3],
  );
  assert.deepEqual(
    picture.rows.get("a").did.map(([step]) => step),
    [1, 2, 7, 8],
  );
});

test("a clone goes its own way", () => {
  const picture = pictureOf(full([NULL_BLOCK, EMPTY_BLOCK], { rows: [row("a")] }));
  const other = picture.clone();
  const frame = delta([[1, 0, 1, 1, 1]], {
    rows: [row("b")],
    gone: ["a"],
    cells: [[1, [], "x", null, null, null]],
  });
  other.apply(frame, columns(frame));
  assert.deepEqual([picture.state[1], [...picture.rows.keys()], picture.cells.size], [0, ["a"], 0]);
  assert.deepEqual([other.state[1], [...other.rows.keys()], other.cells.size], [1, ["b"], 1]);
});

test("the struct stays until another one is told, the news of a step do not", () => {
  const struct = { kind: "SchedulerOutput", fields: [["step", 1]], changed: [] };
  const first = full([NULL_BLOCK], {
    at: 1,
    where: "Here.",
    struct,
    preempted: ["a"],
    misses: { b: "missed" },
  });
  const picture = pictureOf(first);
  assert.deepEqual(
    [picture.at, picture.where, picture.struct, picture.preempted],
    [1, "Here.", struct, ["a"]],
  );
  const frame = delta([], { at: 2 });
  picture.apply(frame, columns(frame));
  assert.deepEqual(
    [picture.at, picture.struct, picture.preempted, picture.misses],
    [2, struct, [], {}],
  );
});

test("a large pool comes in bins, whole and then those that changed", () => {
  const first = binned("full", 400, [
    [399, 0, 2, 0x50],
    [0, 300, 7, 0],
    [0, 0, 255, 0],
  ]);
  const picture = pictureOf(first);
  assert.equal(picture.numBlocks, 1200);
  assert.deepEqual([...picture.bins.kept], [0, 300, 0]);
  const tracker = picture.track();
  tracker.take();
  const later = binned("delta", 400, [[2, 17, 1, 3, 0x40]], { step: 1 });
  const other = picture.clone();
  picture.apply(later, columns(later));
  assert.deepEqual([picture.bins.used[2], picture.bins.slot[2]], [17, 3]);
  assert.deepEqual([...tracker.take().blocks], [800]);
  assert.equal(other.bins.used[2], 0);
  assert.deepEqual(columnsFromBuffers(later, buffers(later)), columnsFromLists(later));
  const outside = binned("delta", 400, [[9, 1, 1, 1, 1]], { seq: 2 });
  assert.throws(() => picture.apply(outside, columns(outside)), /bin 9, the pool has 3/);
  const small = full([NULL_BLOCK, EMPTY_BLOCK], { seq: 9 });
  picture.apply(small, columns(small));
  assert.deepEqual([picture.bins, picture.numBlocks], [null, 2]);
});
