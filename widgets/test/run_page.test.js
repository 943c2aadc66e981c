import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";
import { deflateSync } from "node:zlib";
import { readFrames, showRun } from "../src/page.js";
import { randomRun } from "./frames.js";
import { countListeners, openPage } from "./page.js";

const FRAMES = randomRun(9, { steps: 30 }).deltas.map((frame) => ({ ...frame, phase: "replay" }));
let page;
beforeEach(() => {
  page = openPage();
  mock.timers.enable({ apis: ["setTimeout", "setInterval", "Date"], now: 1_000_000 });
});
afterEach(() => {
  mock.timers.reset();
  page.close();
});

function open(settings = "") {
  const root = page.document.createElement("div");
  page.document.body.append(root);
  const run = showRun(root, FRAMES, new URLSearchParams(settings));
  const dashboard = root.querySelector(".lms");
  return { root, run, key: (key) => page.key(dashboard, key), step: () => run.player.picture.step };
}

test("frames come out of the page as they went in", async () => {
  const text = deflateSync(Buffer.from(JSON.stringify({ v: 1, frames: FRAMES }))).toString(
    "base64",
  );
  assert.deepEqual(await readFrames(`\n${text}\n`), FRAMES);
  const later = deflateSync(Buffer.from(JSON.stringify({ v: 2, frames: [] }))).toString("base64");
  await assert.rejects(readFrames(later), /version 2/);
});

test("a run opens at its end, or at the step of the address", () => {
  const last = open();
  assert.equal(last.step(), 29);
  const chosen = open("step=12&theme=dark&sel=r1");
  assert.equal(chosen.step(), 12);
  assert.equal(chosen.root.querySelector(".lms").dataset.theme, "dark");
  assert.equal(chosen.run.dashboard.link.selected, "r1");
});

test("keys work before anything was clicked, and not twice when it was", () => {
  const { run, key, step } = open("step=5");
  page.key(page.document.body, "ArrowRight");
  assert.equal(step(), 6);
  key("ArrowRight");
  assert.equal(step(), 7);
  page.key(page.document.body, "x");
  assert.equal(step(), 7);
  run.destroy();
  page.key(page.document.body, "ArrowRight");
  assert.equal(step(), 7);
});

test("keys move through the steps", () => {
  const { key, step, run } = open("step=5");
  key("ArrowRight");
  assert.equal(step(), 6);
  key("ArrowLeft");
  key("ArrowLeft");
  assert.equal(step(), 4);
  key("End");
  assert.equal(step(), 29);
  key("ArrowRight");
  assert.equal(step(), 29);
  key("Home");
  assert.equal(step(), 0);
  assert.equal(run.transport.slider.value, "0");
});

test("the slider moves through the steps and says where it is", () => {
  const { root, run, step } = open();
  const { slider } = run.transport;
  assert.deepEqual([slider.type, slider.min, slider.max, slider.value], ["range", "0", "29", "29"]);
  slider.value = "7";
  slider.dispatchEvent(new page.window.Event("input"));
  assert.equal(step(), 7);
  assert.equal(slider.getAttribute("aria-valuetext"), "step 7");
  assert.equal(root.querySelector(".lms-step").textContent, "step 7 / 29");
});

test("it plays to the end and stops, and any step stops it", () => {
  const { key, step, run } = open("step=26");
  key(" ");
  assert.equal(run.transport.isPlaying, true);
  mock.timers.tick(350);
  assert.equal(step(), 27);
  key("ArrowLeft");
  assert.equal(run.transport.isPlaying, false);
  key(" ");
  mock.timers.tick(350 * 10);
  assert.equal(step(), 29);
  assert.equal(run.transport.isPlaying, false);
  key(" ");
  assert.equal(step(), 0);
});

test("it plays faster and slower", () => {
  const { root, key, step } = open("step=2");
  const speed = root.querySelector(".lms-speed");
  key(" ");
  speed.value = "4";
  speed.dispatchEvent(new page.window.Event("change"));
  mock.timers.tick(350);
  assert.equal(step(), 6);
});

test("in the narrowest view the legend is behind the question mark", () => {
  const { root, key } = open();
  key("?");
  assert.ok(root.querySelector(".lms").classList.contains("lms-helping"));
  key("Escape");
  assert.ok(!root.querySelector(".lms").classList.contains("lms-helping"));
});

test("brackets go from request to request, Escape lets go", () => {
  const { key, run } = open();
  key("]");
  const first = run.dashboard.link.selected;
  assert.ok(first);
  key("]");
  assert.notEqual(run.dashboard.link.selected, first);
  key("[");
  assert.equal(run.dashboard.link.selected, first);
  key("Escape");
  assert.equal(run.dashboard.link.selected, null);
});

test("T shows the pictures as tables", () => {
  const { key, root } = open("step=10");
  key("T");
  page.tick();
  const [steps, blocks] = root.querySelectorAll(".lms-table table");
  assert.equal(steps.querySelectorAll("tbody tr").length, 11);
  assert.equal(blocks.querySelectorAll("tbody tr").length, 24);
  assert.match(blocks.textContent, /null/);
});

test("plus and minus scale the text between 11 and 18", () => {
  const { key, root } = open();
  const size = () => root.querySelector(".lms").style.getPropertyValue("--lms-size");
  for (let k = 0; k < 9; k++) key("+");
  assert.equal(size(), "18px");
  for (let k = 0; k < 20; k++) key("-");
  assert.equal(size(), "11px");
});

test("question mark shows the keys and Escape hides them", () => {
  const { key, root } = open();
  const help = root.querySelector(".lms-help");
  assert.equal(help.hidden, true);
  key("?");
  assert.equal(help.hidden, false);
  assert.match(help.textContent, /play or pause/);
  key("Escape");
  assert.equal(help.hidden, true);
});

test("where we are is announced at most once a second", () => {
  const { key, root } = open("step=0");
  const live = root.querySelector("[aria-live=polite]");
  const said = new Set();
  for (let k = 0; k < 20; k++) {
    key("ArrowRight");
    mock.timers.tick(100);
    said.add(live.textContent);
  }
  mock.timers.tick(1000);
  assert.match(live.textContent, /^step 20: \d+ of 23 blocks used, 0 requests, 0 preemptions$/);
  assert.ok(said.size <= 3, [...said].join("; "));
});

test("clean-up takes back all elements, listeners and timers", () => {
  // What listens on elements that go, goes with them; nothing may stay on those that do not.
  const counts = [page.document, page.document.body, page.window].map(countListeners);
  const { root, run, key } = open("step=3");
  key(" ");
  run.destroy();
  assert.equal(root.childNodes.length, 0);
  const step = run.player.picture.step;
  mock.timers.tick(5000);
  assert.equal(run.player.picture.step, step);
  assert.deepEqual(
    counts.map((count) => count()),
    [0, 0, 0],
  );
  assert.equal(page.waiting, 0);
});
