import assert from "node:assert/strict";
import { test } from "node:test";
import { History } from "../src/core/history.js";
import { Picture } from "../src/core/picture.js";
import { Player } from "../src/core/player.js";
import { columns, delta, full, NULL_BLOCK, randomRun, row, STAT } from "./frames.js";

/** Records steps whose rows are as told; `stat` may be a third entry. */
function record(steps) {
  const history = new History();
  const picture = new Picture();
  steps.forEach(([rows, stat = {}, step], k) => {
    const shared = { seq: k, step: step ?? k, rows, stat: { ...STAT, ...stat } };
    const frame = k === 0 ? full([NULL_BLOCK], shared) : delta([], shared);
    assert.equal(picture.apply(frame, columns(frame)), "applied");
    history.record(picture);
  });
  return history;
}

const works = (history, id) => history.lanes.get(id).marks.map((mark) => [mark.work, mark.tokens]);

test("a request waits, computes its prompt in chunks, then decodes", () => {
  const history = record([
    [[row("a", { state: "waiting", computed: 0, output: 0 })]],
    [[row("a", { computed: 6, output: 0 })]],
    [[row("a", { computed: 8, output: 1 })]],
    [[row("a", { computed: 9, output: 2 })]],
    [[row("a", { state: "finished", computed: 10, output: 3, ended: 4, max: 3 })]],
    [[]],
  ]);
  assert.deepEqual(works(history, "a"), [
    ["waiting", 0],
    ["prefill", 6],
    ["prefill", 2],
    ["decode", 1],
    ["decode", 1],
  ]);
  const lane = history.lanes.get("a");
  assert.deepEqual([lane.first, lane.last, lane.isFull, lane.sawArrival], [0, 4, true, true]);
});

test("tokens from the cache are not computed ones", () => {
  const history = record([
    [[row("a", { computed: 0, output: 0, state: "waiting" })]],
    [[row("a", { computed: 8, cached: 6, output: 1 })], { cached: 6 }],
  ]);
  const mark = history.lanes.get("a").marks[1];
  assert.deepEqual([mark.work, mark.tokens, mark.cached], ["prefill", 2, 6]);
});

test("after a preemption tokens are computed again, and then new ones decoded", () => {
  const history = record([
    [[row("a", { computed: 0, output: 0, state: "waiting" })]],
    [[row("a", { computed: 8, output: 1 })]],
    [[row("a", { computed: 9, output: 2 })]],
    [[row("a", { computed: 0, output: 2, state: "preempted", preemptions: 1, lost: 9 })]],
    [[row("a", { computed: 10, output: 3, preemptions: 1, lost: 9 })]],
    [[row("a", { computed: 11, output: 4, preemptions: 1, lost: 9 })]],
  ]);
  assert.deepEqual(works(history, "a").slice(2), [
    ["decode", 1],
    ["waiting", 0],
    ["recompute", 10],
    ["decode", 1],
  ]);
  assert.equal(history.lanes.get("a").marks[3].preempted, true);
  assert.deepEqual(history.entries[3].preempted, ["a"]);
  assert.equal(history.nextEvent(0, 1), 3);
  assert.equal(history.nextEvent(5, -1), 3);
  assert.equal(history.nextEvent(3, 1), null);
});

test("a stream that leaves out steps makes entries that span them", () => {
  const history = record([
    [[row("a")], {}, 0],
    [[row("a", { computed: 12, output: 5 })], {}, 4],
  ]);
  assert.deepEqual(
    history.entries.map((entry) => [entry.from, entry.step]),
    [
      [0, 0],
      [1, 4],
    ],
  );
  assert.deepEqual(works(history, "a")[1], ["decode", 4]);
});

test("a second picture of a step replaces the first and adds no column", () => {
  const history = record([
    [[row("a", { computed: 8, output: 1 })], {}, 1],
    [[row("a", { computed: 9, output: 2 })], { waiting: 2 }, 1],
  ]);
  assert.equal(history.length, 1);
  assert.equal(history.entries[0].stat.waiting, 2);
  assert.equal(history.lanes.get("a").marks.length, 1);
});

test("a request met late has no invented prefill", () => {
  const history = record([[[row("a", { computed: 40, output: 30, arrived: -5 })]]]);
  assert.deepEqual(works(history, "a"), [["decode", 40]]);
  assert.equal(history.lanes.get("a").sawArrival, false);
});

test("old entries are dropped and lanes keep their place", () => {
  const history = new History(100);
  const picture = new Picture();
  for (let k = 0; k < 700; k++) {
    const rows =
      k === 0
        ? [row("old", { state: "finished", ended: 0 }), row("live")]
        : [row("live", { computed: 8 + k })];
    const frame = k === 0 ? full([NULL_BLOCK], { rows }) : delta([], { seq: k, step: k, rows });
    picture.apply(frame, columns(frame));
    history.record(picture);
  }
  assert.ok(history.length < 700 && history.length >= 100);
  assert.equal(history.entries.at(-1).step, 699);
  assert.deepEqual([...history.lanes.keys()], ["live"]);
  assert.equal(
    history.lanes.get("live").first + history.lanes.get("live").marks.length,
    history.length,
  );
});

test("any step can be sought, from either side, with the same picture", () => {
  const { fulls, deltas } = randomRun(7, { steps: 90 });
  const frames = deltas.map((frame, k) => (k % 64 === 0 ? { ...fulls[k] } : frame));
  const player = new Player(frames);
  assert.equal(player.history.length, 90);
  for (const place of [0, 89, 64, 63, 65, 1, 70, 5]) {
    const picture = player.seek(place);
    assert.equal(picture.step, place);
    assert.deepEqual([...picture.state], fulls[place].columns.state, `step ${place}`);
    assert.deepEqual(
      [...picture.rows.values()].map((r) => r.text).sort(),
      fulls[place].rows.map((r) => r.text).sort(),
    );
  }
  assert.equal(player.seek(1000).step, 89);
  assert.equal(player.seek(-3).step, 0);
  assert.equal(player.placeOf(66), 66);
});

test("marks of a step are the same however it is reached", () => {
  const { fulls, deltas } = randomRun(11, { steps: 80 });
  const frames = deltas.map((frame, k) => (k % 64 === 0 ? { ...fulls[k] } : frame));
  const forward = new Player(frames);
  forward.seek(0);
  const written = [];
  for (let k = 0; k < 80; k++) written.push([...forward.seek(k).writtenFrom]);
  for (const place of [64, 65, 30, 64])
    assert.deepEqual([...forward.seek(place).writtenFrom], written[place], `step ${place}`);
});

test("a page with a hole is refused", () => {
  const { deltas } = randomRun(2);
  assert.throws(() => new Player(deltas.toSpliced(5, 1)), /frame 5 of the page is missing/);
  assert.throws(() => new Player(deltas.slice(1)), /begins with a full frame/);
});
