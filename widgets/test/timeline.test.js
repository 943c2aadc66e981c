import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { History } from "../src/core/history.js";
import { createLink } from "../src/core/link.js";
import { makeColours } from "../src/core/palette.js";
import { Picture } from "../src/core/picture.js";
import { createTimeline, stepSummary } from "../src/timeline.js";
import { entryAt, laneAt, planTimeline, xOf } from "../src/timeline_layout.js";
import { columns, delta, full, NULL_BLOCK, row, STAT } from "./frames.js";
import { openPage, recordingContext } from "./page.js";

const THEME = { colours: makeColours("light"), ui: "sans-serif", mono: "monospace", textSize: 12 };
let page;
beforeEach(() => {
  page = openPage({ width: 1000 });
});
afterEach(() => page.close());

/** A run of `steps` with `requests` that all arrive at the start. */
function runOf(steps, requests = 2) {
  const history = new History();
  const picture = new Picture();
  const add = (k) => {
    const rows = Array.from({ length: requests }, (_, i) =>
      row(`r${i}`, { slot: i % 24, computed: 8 + k, output: 1 + k }),
    );
    if (k >= 5) Object.assign(rows[1], { state: "finished", computed: 13, ended: 5 });
    const stat = {
      ...STAT,
      used: 1,
      scheduled: requests,
      decode: requests,
      waiting: k === 3 ? 2 : 0,
      evicted: k === 4 ? 1 : 0,
    };
    const frame =
      k === 0
        ? full([NULL_BLOCK, [0, 1, 1, 4]], { rows, stat })
        : delta([], { seq: k, step: k, rows, stat });
    picture.apply(frame, columns(frame));
    history.record(picture);
  };
  for (let k = 0; k < steps; k++) add(k);
  return { history, picture, add };
}

const plan = (history, more = {}) =>
  planTimeline({
    history,
    cursor: 0,
    width: 1000,
    textSize: 12,
    budget: 32,
    isNarrow: false,
    isLive: false,
    ...more,
  });

test("a point finds the step that is drawn there", () => {
  const { history } = runOf(60);
  const made = plan(history);
  for (let k = 0; k < 60; k++)
    assert.equal(entryAt(made, (xOf(made, k) + xOf(made, k + 1)) / 2, 60), k);
  assert.equal(entryAt(made, 5000, 60), 59);
  assert.equal(entryAt(made, 3, 60), null);
});

test("columns are never wider than 46 px nor narrower than 2", () => {
  assert.equal(plan(runOf(3).history).column <= 46, true);
  const long = plan(runOf(2000).history);
  assert.ok(long.column >= 2 && long.perColumn > 1);
});

test("while steps arrive the columns keep their place", () => {
  const { history, add } = runOf(10);
  const before = plan(history, { isLive: true });
  for (let k = 10; k < 38; k++) add(k);
  assert.equal(plan(history, { isLive: true }).column, before.column);
});

test("at most 16 lanes, and the rest is counted", () => {
  const made = plan(runOf(5, 30).history);
  assert.equal(made.shown.length, 16);
  assert.equal(made.hiddenLanes, 14);
  assert.equal(laneAt(made, made.lanes + 2.5 * made.laneHeight).id, "r2");
  assert.equal(laneAt(made, 3), null);
});

test("a new step draws its column and nothing else", () => {
  const { history, picture, add } = runOf(10);
  const root = page.document.createElement("div");
  const context = recordingContext();
  const timeline = createTimeline(root, createLink(), { context });
  const draw = () =>
    timeline.update(picture, {
      theme: THEME,
      history,
      cursor: history.length - 1,
      isNarrow: false,
      isLive: true,
    });
  draw();
  context.calls.length = 0;
  draw();
  assert.equal(context.calls.length, 0);
  add(10);
  draw();
  const from = xOf(timeline.plan, 10) - 5;
  assert.ok(context.calls.length > 0);
  for (const { name, args } of context.calls)
    if (name === "fillRect" || name === "arc") assert.ok(args[0] >= from, `${args}`);
  assert.ok(!context.calls.some((call) => call.name === "clearRect"));
});

test("a step that is told again is drawn again, and what stands before it is left alone", () => {
  const { history, picture, add } = runOf(10);
  const root = page.document.createElement("div");
  const context = recordingContext();
  const timeline = createTimeline(root, createLink(), { context });
  const look = { theme: THEME, history, isNarrow: false, isLive: true };
  const draw = () => timeline.update(picture, { ...look, cursor: history.length - 1 });
  draw();
  history.entries[9] = { ...history.entries[9], stat: { ...STAT, scheduled: 9, decode: 9 } };
  add(10);
  context.calls.length = 0;
  draw();
  const clipped = context.calls.find((call) => call.name === "rect");
  assert.equal(clipped.args[0], xOf(timeline.plan, 9) - 5);
  assert.ok(context.calls.some((call) => call.name === "clip"));
  const bars = context.calls.filter(
    (call) => call.name === "fillRect" && call.fillStyle === THEME.colours.work.decode,
  );
  assert.deepEqual(
    bars.map((call) => call.args[0] >= xOf(timeline.plan, 8)),
    bars.map(() => true),
  );
  context.calls.length = 0;
  draw();
  assert.equal(context.calls.length, 0);
});

test("the cursor stands over the column of its step, and is hidden where there is none", () => {
  const { history, picture } = runOf(20);
  const root = page.document.createElement("div");
  page.document.body.append(root);
  const timeline = createTimeline(root, createLink());
  const look = { theme: THEME, history, isNarrow: false, isLive: true };
  timeline.update(picture, { ...look, cursor: 7 });
  const cursor = root.querySelector(".lms-time-cursor");
  const { plan: made } = timeline;
  assert.equal(cursor.style.left, `${xOf(made, 7)}px`);
  assert.equal(cursor.style.width, `${xOf(made, 8) - xOf(made, 7)}px`);
  assert.equal(root.querySelector(".lms-stack").style.height, `${made.height}px`);
  assert.equal(cursor.hidden, false);
  timeline.update(picture, { ...look, cursor: -1 });
  assert.equal(cursor.hidden, true);
});

test("dragging seeks, a name in the margin is kept lit", () => {
  const { history, picture } = runOf(20);
  const root = page.document.createElement("div");
  page.document.body.append(root);
  const link = createLink();
  const sought = [];
  const timeline = createTimeline(root, link, { onSeek: (entry) => sought.push(entry) });
  timeline.update(picture, { theme: THEME, history, cursor: 0, isNarrow: false, isLive: false });
  const over = root.querySelector(".lms-stack");
  const { plan: made } = timeline;
  const x = (k) => (xOf(made, k) + xOf(made, k + 1)) / 2;
  page.point(over, "pointerdown", x(4), 40);
  page.point(over, "pointermove", x(7), 40);
  page.point(over, "pointerup", x(7), 40);
  page.point(over, "pointermove", x(9), made.lanes + 3);
  assert.deepEqual(sought, [4, 7]);
  assert.equal(link.lit, "r0");
  page.point(over, "pointerdown", 20, made.lanes + made.laneHeight + 3);
  assert.equal(link.selected, "r1");
});

test("the title tells what the step did", () => {
  const { history, picture } = runOf(3);
  history.entries[2].stat = { ...STAT, scheduled: 12, decode: 3, prefill: 9, cached: 18 };
  history.entries[2].preempted = ["r9", "r0"];
  assert.equal(
    stepSummary(picture, history, 2),
    "step 2: 12 of 32 tokens · 3 decode, 9 prefill · 18 more from the cache · r9, r0 preempted",
  );
});
