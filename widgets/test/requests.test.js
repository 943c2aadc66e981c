import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { createLink } from "../src/core/link.js";
import { makeColours } from "../src/core/palette.js";
import { createRequests, order } from "../src/requests.js";
import { columns, delta, full, NULL_BLOCK, pictureOf, row } from "./frames.js";
import { assertHarmless, HOSTILE, openPage } from "./page.js";

const THEME = { colours: makeColours("dark"), ui: "sans-serif", mono: "monospace", textSize: 12 };
let page;
beforeEach(() => {
  page = openPage();
});
afterEach(() => page.close());

function viewOf(picture, make = createRequests) {
  const root = page.document.createElement("div");
  page.document.body.append(root);
  const link = createLink();
  const view = make(root, link);
  const tracker = picture.track();
  const draw = (preempted = []) =>
    view.update(picture, { theme: THEME, changes: tracker.take(), preempted });
  draw();
  return { root, link, view, draw };
}

const ids = (root) => [...root.querySelectorAll("tbody tr")].map((line) => line.dataset.id);

test("text from a model stays text, in every column", () => {
  const hostile = row(HOSTILE, { why: HOSTILE, prompt_text: HOSTILE, text: HOSTILE });
  const { root } = viewOf(pictureOf(full([NULL_BLOCK], { rows: [hostile] })));
  assertHarmless(root);
  assert.ok([...root.querySelectorAll("button")].some((chip) => chip.title.includes("<img src=x")));
});

test("a line says state, sentence, blocks, what came from the cache, preemptions, how long it waited", () => {
  const picture = pictureOf(
    full([NULL_BLOCK], {
      rows: [row("r0", { blocks: 12, shared: 9, cached: 1800, preemptions: 2, waited: 5 })],
    }),
  );
  const { root } = viewOf(picture);
  const cells = [...root.querySelectorAll("tbody td")].map((cell) => cell.textContent);
  assert.deepEqual(cells, ["r0", "decode: 1 token", "", "12 (9)", "1,800", "2", "5"]);
});

test("of a long name the end is shown and the whole is in its title", () => {
  const id = "request-000000000017-abcdef";
  const { root } = viewOf(pictureOf(full([NULL_BLOCK], { rows: [row(id)] })));
  const chip = root.querySelector(".lms-chip");
  assert.equal(chip.textContent, "…0017-abcdef");
  assert.equal(chip.title, id);
});

test("running first, then waiting, then finished with the latest on top", () => {
  const rows = [
    row("done1", { state: "finished", ended: 3 }),
    row("wait", { state: "waiting", arrived: 2 }),
    row("run", { arrived: 1 }),
    row("lost", { state: "preempted", arrived: 1 }),
    row("done2", { state: "finished", ended: 7 }),
  ];
  const picture = pictureOf(full([NULL_BLOCK], { rows }));
  assert.deepEqual(
    order(picture).map((r) => r.id),
    ["run", "lost", "wait", "done2", "done1"],
  );
  assert.deepEqual(ids(viewOf(picture).root), ["run", "lost", "wait", "done2", "done1"]);
});

test("lines come, move and go with the frames; those that stay keep their elements", () => {
  const picture = pictureOf(full([NULL_BLOCK], { rows: [row("a"), row("b", { arrived: 1 })] }));
  const { root, draw } = viewOf(picture);
  const line = root.querySelector('[data-id="b"]');
  const frame = delta([], {
    gone: ["a"],
    rows: [row("c", { arrived: 2 }), { id: "b", state: "finished", ended: 1 }],
  });
  picture.apply(frame, columns(frame));
  draw();
  assert.deepEqual(ids(root), ["c", "b"]);
  assert.equal(root.querySelector('[data-id="b"]'), line);
  assert.equal(line.dataset.state, "finished");
});

test("a frame that changes one request leaves the others alone", () => {
  const picture = pictureOf(full([NULL_BLOCK], { rows: [row("a"), row("b", { arrived: 1 })] }));
  const { root, draw } = viewOf(picture);
  let mutations = 0;
  const observed = root.querySelector('[data-id="a"]');
  const observer = new page.window.MutationObserver((records) => {
    mutations += records.length;
  });
  observer.observe(observed, {
    subtree: true,
    childList: true,
    characterData: true,
    attributes: true,
  });
  const frame = delta([], { rows: [{ id: "b", add: " more", output: 2 }] });
  picture.apply(frame, columns(frame));
  draw();
  mutations += observer.takeRecords().length;
  assert.equal(mutations, 0);
  // In the line itself only what differs is written.
  const blocks = root.querySelector('[data-id="b"] .lms-c3').firstChild;
  const again = delta([], { seq: 2, rows: [{ id: "b", add: "!" }] });
  picture.apply(again, columns(again));
  draw();
  assert.equal(root.querySelector('[data-id="b"] .lms-c3').firstChild, blocks);
});

test("a bar shows what was computed, cached, given up, and where the prompt ends", () => {
  const picture = pictureOf(
    full([NULL_BLOCK], { rows: [row("a", { prompt: 8, max: 8, computed: 12, cached: 4 })] }),
  );
  const { root, draw } = viewOf(picture);
  const part = (name) => root.querySelector(`.lms-bar-${name}`);
  assert.deepEqual(
    [part("done").style.width, part("cached").style.width, part("tick").style.left],
    ["75%", "25%", "50%"],
  );
  assert.equal(part("lost").hidden, true);
  const frame = delta([], { rows: [{ id: "a", state: "preempted", computed: 0, lost: 12 }] });
  picture.apply(frame, columns(frame));
  draw();
  assert.equal(part("lost").hidden, false);
  assert.equal(part("lost").style.width, "75%");
  assert.equal(part("cached").hidden, true);
});

test("a preemption is in the colour of trouble in its own step only", () => {
  const lost = row("a", { state: "preempted", preemptions: 1 });
  const { root, draw } = viewOf(pictureOf(full([NULL_BLOCK], { rows: [lost] })));
  const line = root.querySelector('[data-id="a"]');
  assert.equal(line.dataset.state, "waiting");
  draw(["a"]);
  assert.equal(line.dataset.state, "preempted");
  assert.ok(line.querySelector(".lms-c5").classList.contains("lms-bad"));
  draw([]);
  assert.equal(line.dataset.state, "waiting");
  assert.ok(!line.querySelector(".lms-c5").classList.contains("lms-bad"));
});

test("pointing at a line lights it, a click on its name keeps it lit", () => {
  const picture = pictureOf(full([NULL_BLOCK], { rows: [row("a"), row("b")] }));
  const { root, link, draw } = viewOf(picture);
  const line = root.querySelector('[data-id="a"]');
  page.point(line, "pointerenter");
  assert.equal(link.lit, "a");
  draw();
  assert.ok(root.querySelector('[data-id="b"]').classList.contains("lms-dim"));
  page.point(line, "pointerleave");
  assert.equal(link.lit, null);
  page.point(line.querySelector("button"), "click");
  assert.equal(link.selected, "a");
  draw();
  assert.equal(line.querySelector("button").getAttribute("aria-pressed"), "true");
});

test("of many requests a hundred are listed and the rest counted", () => {
  const rows = Array.from({ length: 130 }, (_, k) => row(`r${k}`, { arrived: k }));
  const { root } = viewOf(pictureOf(full([NULL_BLOCK], { rows })));
  assert.equal(ids(root).length, 100);
  assert.ok(root.textContent.includes("and 30 more requests"));
});

test("clean-up leaves nothing", () => {
  const { root, view, link } = viewOf(pictureOf(full([NULL_BLOCK], { rows: [row("a")] })));
  const line = root.querySelector("tbody tr");
  view.destroy();
  assert.equal(root.childNodes.length, 0);
  page.point(line, "pointerenter");
  assert.equal(link.lit, null);
});
