import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";
import { NOTHING } from "../src/actions.js";
import { breakWords, createDebugger, KINDS } from "../src/debugger.js";
import { createStructTree, preview } from "../src/struct_tree.js";
import { columns, delta, full, NULL_BLOCK, pictureOf } from "./frames.js";
import { assertHarmless, HOSTILE, openPage } from "./page.js";

let page;
beforeEach(() => {
  page = openPage();
});
afterEach(() => page.close());

const STRUCT = {
  kind: "SchedulerOutput",
  fields: [
    ["step", 22],
    ["num_scheduled_tokens", { r3: 1, r6: 9 }],
    ["preempted_req_ids", []],
    ["decisions", [{ why: "decode: 1 token", request_id: "r3", tokens_granted: 1 }]],
    ["kv_events", [{ type: "BlockFreed", block_id: 7 }, { "…": 40 }]],
  ],
  changed: ["num_scheduled_tokens", "preempted_req_ids"],
};

function viewOf(more = {}, operations = []) {
  const asked = [];
  const actions = {
    ...NOTHING,
    can: (op) => operations.includes(op),
    perform: (action) => asked.push(action) > 0,
    stepTo: (kind) => asked.push(["to", kind]),
    send: (op, argument) => asked.push([op, argument]),
  };
  const root = page.document.createElement("div");
  page.document.body.append(root);
  const view = createDebugger(root, actions);
  const first = full([NULL_BLOCK], { step: 22, at: 1, boundary: "SchedulerOutput", ...more });
  const picture = pictureOf(first);
  view.update(picture, "paused");
  return { root, view, picture, asked, actions, all: (css) => [...root.querySelectorAll(css)] };
}

test("five stations: passed, here, to come; a dot where the engine will stop", () => {
  const breaks = [
    ["preemption", 1, true],
    ["finish", 4, false],
  ];
  const { all } = viewOf({ breaks });
  const stations = all(".lms-station");
  assert.deepEqual(
    stations.map((one) => one.textContent),
    KINDS,
  );
  assert.deepEqual(
    stations.map((one) => one.dataset.state),
    ["past", "here", "ahead", "ahead", "ahead"],
  );
  assert.deepEqual(
    all(".lms-break-dot").map((dot) => dot.hidden),
    [true, false, true, true, true],
  );
});

test("of structs that pass by one is shown for half a second, then the latest", () => {
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1_000_000 });
  const tree = createStructTree();
  const shown = () => tree.element.querySelector(".lms-kind b")?.textContent;
  const pass = (kind, isPassing = true) => tree.update({ ...STRUCT, kind }, isPassing);
  pass("A");
  assert.equal(shown(), "A");
  pass("B");
  mock.timers.tick(400);
  pass("C");
  assert.equal(shown(), "A");
  mock.timers.tick(99);
  assert.equal(shown(), "A");
  mock.timers.tick(1);
  assert.equal(shown(), "C");
  pass("D");
  pass("E", false);
  assert.equal(shown(), "E", "an engine that stands is shown at once");
  mock.timers.tick(1000);
  assert.equal(shown(), "E");
  pass("F");
  assert.equal(shown(), "F");
  pass("G");
  tree.destroy();
  mock.timers.tick(1000);
  assert.equal(shown(), "F");
  mock.timers.reset();
});

test("it says in words where the engine stands", () => {
  const { root } = viewOf({ where: "The scheduler has decided." });
  assert.equal(
    root.querySelector(".lms-where").textContent,
    "Step 22, SchedulerOutput. The scheduler has decided.",
  );
});

test("buttons are there only for what can be done", () => {
  const shown = (all) =>
    all(".lms-dbgbar button").filter((one) => !one.hidden && !one.parentElement.hidden);
  assert.equal(shown(viewOf().all).length, 0);
  const { all, asked } = viewOf({}, ["pause", "step", "back"]);
  assert.deepEqual(
    shown(all).map((one) => one.textContent),
    [" Pause", " Step", " Step to", " Back"],
  );
  for (const one of shown(all)) page.point(one, "click");
  page.point(all(".lms-station")[3], "click");
  assert.deepEqual(asked, [
    ...["play", "boundary"],
    ["to", "SchedulerOutput"],
    "boundary_back",
    ["to", "EngineCoreOutputs"],
  ]);
});

test("breakpoints are named in words, taken away by a click and set from a list", () => {
  const breaks = [
    ["preemption", 1, true],
    ["finish:r2", 4, true],
    ["ModelRunnerOutput", 2, false],
    [HOSTILE, 3, true],
  ];
  const { all, asked, root } = viewOf({ breaks }, ["break", "unbreak"]);
  assertHarmless(root);
  const words = all(".lms-break").map((one) => one.textContent.trim());
  assert.deepEqual(words.slice(0, 3), [
    ...["on a preemption", "on a request that ends of r2", "every ModelRunnerOutput, off"],
  ]);
  page.point(all(".lms-break")[1], "click");
  const select = root.querySelector(".lms-breakbar select");
  select.value = "eviction";
  select.dispatchEvent(new page.window.Event("change"));
  assert.deepEqual(asked, [
    ["unbreak", "finish:r2"],
    ["break", "eviction"],
  ]);
  assert.equal(select.value, "");
  assert.equal(breakWords("my_test", 2), "ModelRunnerOutput if my_test");
});

test("the struct unfolds, and a dot marks what differs from the last of its kind", () => {
  const { all, root } = viewOf({ struct: STRUCT });
  assert.equal(
    root.querySelector(".lms-kind").textContent,
    "SchedulerOutput ● differs from the one before",
  );
  const dots = all(".lms-struct .lms-changed[title]");
  assert.deepEqual(
    dots.map((dot) => dot.previousSibling.previousSibling.textContent),
    ["num_scheduled_tokens", "preempted_req_ids"],
  );
  const [scheduled, decisions, events] = all(".lms-struct > details");
  assert.equal(
    scheduled.querySelector("summary").textContent,
    "num_scheduled_tokens ● changed  {r3: 1, r6: 9}",
  );
  // Decisions are open from the start, and their entries bear the sentence.
  assert.equal(decisions.open, true);
  assert.equal(
    decisions.querySelector("details details summary").textContent,
    "r3  'decode: 1 token'",
  );
  // What is closed has not been made.
  assert.equal(events.childElementCount, 1);
  events.open = true;
  events.dispatchEvent(new page.window.Event("toggle"));
  assert.ok(events.textContent.includes("40 more"));
});

test("what was unfolded stays so with the next struct of the kind", () => {
  const { view, picture, all } = viewOf({ struct: STRUCT });
  const [scheduled, decisions] = all(".lms-struct > details");
  for (const [details, open] of [
    [scheduled, true],
    [decisions, false],
  ]) {
    details.open = open;
    details.dispatchEvent(new page.window.Event("toggle"));
  }
  const frame = delta([], { at: 1, struct: { ...STRUCT, changed: [] } });
  picture.apply(frame, columns(frame));
  view.update(picture, "paused");
  const again = all(".lms-struct > details");
  assert.notEqual(again[0], scheduled);
  assert.deepEqual(
    again.map((details) => details.open),
    [true, false, false],
  );
});

test("text in a struct stays text", () => {
  const struct = {
    kind: "RequestOutput",
    fields: [
      [HOSTILE, HOSTILE],
      ["outputs", { [HOSTILE]: HOSTILE }],
    ],
    changed: [],
  };
  const tree = createStructTree();
  page.document.body.append(tree.element);
  tree.update(struct);
  const details = tree.element.querySelector("details");
  details.open = true;
  details.dispatchEvent(new page.window.Event("toggle"));
  assertHarmless(tree.element);
});

test("values are written as Python would, and cut to their room", () => {
  assert.equal(preview(null, 80), "None");
  assert.equal(preview(true, 80), "True");
  assert.equal(preview([], 80), "()");
  assert.equal(preview([7], 80), "(7,)");
  assert.equal(preview({ a: [1, 2], b: "x" }, 80), "{a: (1, 2), b: 'x'}");
  assert.equal(preview([1, 2, { "…": 40 }], 80), "(1, 2, …)");
  assert.equal(preview("x".repeat(100), 20).length, 20);
});
