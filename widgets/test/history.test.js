import assert from "node:assert/strict";
import { test } from "node:test";
import { History } from "../src/core/history.js";
import { LOG_NAMES, Picture } from "../src/core/picture.js";
import { Player } from "../src/core/player.js";
import { columns, delta, full, NULL_BLOCK, randomRun, row, STAT } from "./frames.js";

/** Records steps: rows, and where they matter counts, number and other keys of the frame. */
function record(steps, isReplay = false) {
  const history = new History();
  const picture = new Picture();
  steps.forEach(([rows, stat = {}, step, more = {}], k) => {
    const shared = { seq: k, step: step ?? k, rows, stat: { ...STAT, ...stat }, ...more };
    const frame = k === 0 ? full([NULL_BLOCK], shared) : delta([], shared);
    assert.equal(picture.apply(frame, columns(frame)), "applied");
    history.record(picture, isReplay);
  });
  return history;
}

const works = (history, id) => {
  const lane = history.lanes.get(id);
  return history.entries.map((_, k) => history.markAt(lane, k)).map((mark) => mark?.work ?? null);
};

test("a request waits where nothing was computed for it, from its arrival to its end", () => {
  const did = [
    [2, 2, "p", 4],
    [5, 2, "d", 1],
  ];
  const history = record([
    [[row("a", { state: "waiting", arrived: 0 })]],
    [[row("a", { state: "waiting" })]],
    ...[2, 3, 4, 5].map(() => [[row("a", { did })]]),
    [[row("a", { did, state: "finished", ended: 6, output: 3, max: 3 })]],
    [[]],
  ]);
  assert.deepEqual(works(history, "a"), [
    ...[null, "waiting", "prefill", "prefill", "waiting", "decode", "decode", null],
  ]);
  const lane = history.lanes.get("a");
  assert.deepEqual([lane.first, lane.last, lane.isFull], [1, 6, true]);
});

test("tokens from the cache belong to the step that admitted the request", () => {
  const history = record([
    [[]],
    [[row("a", { did: [[1, 2, "p", 2, 6]] })], { cached: 6 }],
    [[row("a", { did: [[1, 2, "p", 2, 6]] })]],
  ]);
  const marks = [1, 2].map((k) => history.markAt(history.lanes.get("a"), k));
  assert.deepEqual(
    marks.map((mark) => [mark.work, mark.tokens, mark.cached]),
    [
      ["prefill", 2, 6],
      ["prefill", 2, 0],
    ],
  );
});

test("a preemption is a mark of its step, whether or not the request ran in it", () => {
  const did = [
    [1, 1, "p", 8],
    [2, 0, "x", 0],
    [4, 0, "x", 0],
    [4, 1, "r", 9],
  ];
  const history = record([
    [[]],
    [[row("a", { did: did.slice(0, 1) })]],
    [[row("a", { did: did.slice(0, 2), state: "preempted" })]],
    [[]],
    [[row("a", { did })]],
  ]);
  const marks = [2, 3, 4].map((k) => history.markAt(history.lanes.get("a"), k));
  assert.deepEqual(
    marks.map((mark) => [mark.work, mark.preempted]),
    [
      ["waiting", true],
      ["waiting", false],
      ["recompute", true],
    ],
  );
});

test("the next event is a hit, an eviction or a preemption", () => {
  const history = record([
    [[]],
    [[], { hits: 1 }],
    [[]],
    [[], { evicted: 2 }],
    [[], {}, 4, { preempted: ["a"] }],
    [[]],
  ]);
  assert.deepEqual(
    [0, 1, 3, 4].map((k) => history.nextEvent(k, 1)),
    [1, 3, 4, null],
  );
  assert.equal(history.nextEvent(3, -1), 1);
});

/** A step as a log tells it. */
const logged = (from, step, more = {}) => [
  ...[from, step, step / 10],
  ...LOG_NAMES.map((name) => ({ ...STAT, ...more })[name]),
  more.preempted ?? [],
];

test("steps that had no frame come from the log, and those that had end as it says", () => {
  const log = [logged(1, 1, { used: 5 }), logged(2, 2, { evicted: 3, preempted: ["a"] })];
  const history = record([
    [[row("a", { did: [[1, 2, "d", 1]] })], {}, 0],
    [[], { used: 1 }, 1],
    [[row("a", { did: [[1, 3, "d", 1]] })], {}, 3, { log }],
  ]);
  assert.deepEqual(
    history.entries.map(({ from, step, stat }) => [from, step, stat.used, stat.evicted]),
    [
      [0, 0, 0, 0],
      [1, 1, 5, 0],
      [2, 2, 0, 3],
      [3, 3, 0, 0],
    ],
  );
  assert.deepEqual(history.entries[2].preempted, ["a"]);
  assert.ok(history.occurred.has("evicted") && history.occurred.has("preempted"));
});

test("a reader who comes late has the steps before, old ones joined", () => {
  const log = [logged(0, 7, { waiting: 9 }), logged(8, 8), logged(9, 9)];
  const history = record([[[row("a", { did: [[3, 8, "d", 1]] })], {}, 10, { log }]]);
  assert.deepEqual(
    history.entries.map(({ from, step }) => [from, step]),
    [
      [0, 7],
      [8, 8],
      [9, 9],
      [10, 10],
    ],
  );
  assert.equal(history.mostWaiting, 9);
  assert.deepEqual(
    [0, 3, 7, 8, 99].map((step) => history.entryOf(step)),
    [0, 0, 0, 1, 3],
  );
  assert.deepEqual(history.markAt(history.lanes.get("a"), 0).tokens, 5);
});

test("a second picture of a step replaces the first and adds no column", () => {
  const history = record([
    [[row("a")], {}, 1],
    [[row("a")], { waiting: 2 }, 1],
  ]);
  assert.equal(history.length, 1);
  assert.equal(history.entries[0].stat.waiting, 2);
});

test("an earlier step begins a new run, except in a replay", () => {
  const steps = [
    [[], {}, 5],
    [[], {}, 6],
    [[], { used: 3 }, 5],
  ];
  assert.equal(record(steps).length, 1);
  const replayed = record(steps, true);
  assert.deepEqual(
    replayed.entries.map((entry) => [entry.step, entry.stat.used]),
    [
      [5, 3],
      [6, 0],
    ],
  );
});

test("how many blocks a request held is known at each step", () => {
  const history = record([
    [[row("a", { blocks: 0 })]],
    [[row("a", { blocks: 2 })]],
    [[row("a", { blocks: 2 })]],
    [[row("a", { blocks: 3 })]],
  ]);
  const lane = history.lanes.get("a");
  assert.deepEqual(
    [1, 2, 3].map((k) => history.markAt(lane, k).blocks),
    [2, 2, 3],
  );
});

test("an id that comes again begins another lane", () => {
  const history = record([
    [[row("a", { did: [[1, 1, "p", 4]] })], {}, 1],
    [[row("a", { state: "finished", ended: 2 })], {}, 2],
    [[row("a", { arrived: 5, did: [[6, 1, "p", 4]] })], {}, 6],
  ]);
  assert.deepEqual([history.lanes.get("a").first, history.lanes.get("a").last], [6, null]);
});

test("old entries are dropped, and the lanes that ended in them", () => {
  const history = new History(100);
  const picture = new Picture();
  for (let k = 0; k < 700; k++) {
    const rows =
      k === 0 ? [row("old", { state: "finished", ended: 0 }), row("live")] : [row("live")];
    const frame = k === 0 ? full([NULL_BLOCK], { rows }) : delta([], { seq: k, step: k, rows });
    picture.apply(frame, columns(frame));
    history.record(picture);
  }
  assert.ok(history.length < 700 && history.length >= 100);
  assert.equal(history.entries.at(-1).step, 699);
  assert.deepEqual([...history.lanes.keys()], ["live"]);
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

test("several frames of a step are one entry, and the last of them is the step's", () => {
  const stops = [0, 1, 1, 1, 2, 2].map((step, seq) =>
    seq === 0 ? full([NULL_BLOCK], { seq, step }) : delta([], { seq, step, at: seq }),
  );
  const player = new Player(stops);
  assert.equal(player.history.length, 3);
  assert.deepEqual(
    [0, 1, 2].map((step) => player.placeOf(step)),
    [0, 3, 5],
  );
  assert.equal(player.seek(2).at, 2);
  assert.equal(player.entry, 1);
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

test("the next event is a hit, an eviction, a preemption or a stop at a breakpoint", () => {
  const stop = { phase: "paused", breaks: [["preemption", 1, true]] };
  const steps = [
    [[]],
    [[], { hits: 2 }],
    [[], {}, 2, stop],
    [[], {}, 2, { phase: "live" }],
    [[], {}, 3, { phase: "live" }],
    [[], { evicted: 1 }, 4, { phase: "live" }],
  ];
  const history = record(steps);
  const events = [];
  for (let k = history.nextEvent(-1, 1); k !== null; k = history.nextEvent(k, 1)) events.push(k);
  assert.deepEqual(
    events.map((k) => history.entries[k].step),
    [1, 2, 4],
  );
  assert.equal(history.nextEvent(3, -1), 2);
  // A replay stands wherever its reader is, and pausing without breakpoints is no event.
  assert.equal(record(steps, true).nextEvent(1, 1), 4);
  const paused = record([[[]], [[], {}, 1, { phase: "paused" }]]);
  assert.equal(paused.nextEvent(-1, 1), null);
});
