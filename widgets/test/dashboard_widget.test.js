import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";
import { deflateSync } from "node:zlib";
import { LOG_NAMES } from "../src/core/picture.js";
import createWidget from "../src/dashboard_widget.js";
import { VIEWS } from "../src/panels.js";
import {
  buffers,
  delta,
  EMPTY_BLOCK,
  full,
  INFO,
  NULL_BLOCK,
  randomRun,
  row,
  STAT,
} from "./frames.js";
import { countListeners, openPage, until } from "./page.js";

let page;
beforeEach(() => {
  page = openPage();
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1_000_000 });
});
afterEach(() => {
  mock.timers.reset();
  page.close();
});

/** anywidget's model, as far as a view sees it. */
function fakeModel(traits = {}) {
  const listeners = new Map();
  const sent = [];
  return {
    sent,
    traits,
    get: (name) => traits[name],
    on: (event, listener) => listeners.set(event, [...(listeners.get(event) ?? []), listener]),
    off: (event, listener) =>
      listeners.set(
        event,
        (listeners.get(event) ?? []).filter((one) => one !== listener),
      ),
    send: (message) => sent.push(message),
    emit: (event, ...values) => {
      for (const listener of listeners.get(event) ?? []) listener(...values);
    },
    frame(frame) {
      const { columns: _, ...header } = frame;
      this.emit("msg:custom", header, buffers(frame));
    },
    count: () => [...listeners.values()].flat().length,
    kinds: () => sent.map((message) => message.k),
  };
}

function open(traits) {
  const model = fakeModel(traits);
  const el = page.document.createElement("div");
  page.document.body.append(el);
  const widget = createWidget();
  const end = widget.initialize({ model });
  const endView = widget.render({ model, el });
  page.tick();
  const cleanup = () => {
    endView();
    end();
  };
  return {
    model,
    el,
    widget,
    endView,
    cleanup,
    pill: () => el.querySelector(".lms-pill").textContent,
  };
}

const FIRST = full([NULL_BLOCK, [0, 1, 1, 2], EMPTY_BLOCK], { rows: [row("a")] });

test("a new view asks for everything", () => {
  const { model, cleanup } = open();
  assert.deepEqual(model.sent, [{ k: "ready" }]);
  cleanup();
});

test("frames are drawn once per animation frame and acknowledged after it", () => {
  const { model, el, cleanup } = open();
  model.frame(FIRST);
  model.frame(delta([], { rows: [{ id: "a", add: " and" }] }));
  assert.deepEqual(model.kinds(), ["ready"]);
  assert.equal(page.waiting, 1);
  page.tick();
  assert.deepEqual(model.sent.slice(1), [{ k: "ack", seq: 1, hidden: false, epoch: 1 }]);
  assert.ok(el.textContent.includes("Say something yes and"));
  assert.deepEqual({ ...el.lmscopeTest }, { frames: 2, drawn: 1, seq: 1, gaps: 0, errors: [] });
  cleanup();
});

test("a gap asks once for everything, and a full frame ends it", () => {
  const { fulls, deltas } = randomRun(5);
  const { model, el, cleanup } = open();
  model.frame(deltas[0]);
  for (const frame of [deltas[2], deltas[3], deltas[4]]) model.frame(frame);
  assert.equal(model.kinds().filter((kind) => kind === "resync").length, 1);
  assert.equal(el.lmscopeTest.gaps, 1);
  model.frame(fulls[5]);
  model.frame(deltas[6]);
  page.tick();
  assert.equal(el.lmscopeTest.seq, 6);
  model.frame(deltas[8]);
  assert.equal(model.kinds().filter((kind) => kind === "resync").length, 2);
  cleanup();
});

test("while no full frame comes the question is repeated, a second apart", () => {
  const { deltas } = randomRun(5);
  const { model, cleanup } = open();
  model.frame(deltas[0]);
  const resyncs = () => model.kinds().filter((kind) => kind === "resync").length;
  model.frame(deltas[2]);
  mock.timers.tick(900);
  model.frame(deltas[3]);
  assert.equal(resyncs(), 1);
  mock.timers.tick(200);
  model.frame(deltas[4]);
  assert.equal(resyncs(), 2);
  cleanup();
});

test("a hidden page keeps up without drawing and says that it is hidden", () => {
  const { model, el, cleanup } = open();
  Object.defineProperty(page.document, "hidden", { configurable: true, value: true });
  model.frame(FIRST);
  assert.equal(page.waiting, 0);
  assert.deepEqual(model.sent.at(-1), { k: "ack", seq: 0, hidden: true, epoch: 1 });
  Object.defineProperty(page.document, "hidden", { configurable: true, value: false });
  page.document.dispatchEvent(new page.window.Event("visibilitychange"));
  page.tick();
  assert.deepEqual(model.sent.at(-1), { k: "ack", seq: 0, hidden: false, epoch: 1 });
  assert.equal(el.lmscopeTest.drawn, 1);
  cleanup();
});

test("a frame that makes no sense is told in one line and mended", () => {
  const { model, el, cleanup } = open();
  model.frame(FIRST);
  model.emit("msg:custom", { ...FIRST, columns: undefined, seq: 1 }, []);
  page.tick();
  assert.equal(model.kinds().filter((kind) => kind === "resync").length, 1);
  assert.match(el.querySelector(".lms-note").textContent, /carries 4 buffers/);
  assert.equal(el.lmscopeTest.errors.length, 1);
  model.frame({ ...FIRST, seq: 2 });
  page.tick();
  assert.equal(el.lmscopeTest.seq, 2);
  cleanup();
});

test("a view that comes again has the whole timeline at once", () => {
  const { deltas } = randomRun(5);
  const { model, widget, endView, cleanup } = open();
  for (const frame of deltas.slice(0, 9)) model.frame(frame);
  page.tick();
  endView();
  model.frame(deltas[9]);
  assert.ok(!model.kinds().includes("resync"));
  const again = page.document.createElement("div");
  page.document.body.append(again);
  const endAgain = widget.render({ model, el: again });
  page.tick();
  page.key(again.querySelector(".lms"), "T");
  page.tick();
  assert.equal(again.querySelector(".lms-p-time .lms-table tbody").children.length, 10);
  mock.timers.tick(500);
  assert.deepEqual(model.sent.at(-1), { k: "ack", seq: 9, hidden: false, epoch: 1 });
  endAgain();
  cleanup();
});

test("of frames that follow one another every fourth one is acknowledged, at once", () => {
  const { model, cleanup } = open();
  const said = () => model.sent.filter((one) => one.k === "ack").map((one) => one.seq);
  const draw = (frame) => {
    model.frame(frame);
    page.tick();
  };
  draw(FIRST);
  assert.deepEqual(said(), [0], "a full frame does not wait");
  for (let seq = 1; seq <= 9; seq++) draw(delta([], { seq }));
  assert.deepEqual(said(), [0, 4, 8]);
  draw({ ...FIRST, seq: 10 });
  draw({ ...FIRST, seq: 11 });
  draw({ ...FIRST, epoch: 2, seq: 0 });
  assert.deepEqual(said(), [0, 4, 8, 10, 11, 0]);
  mock.timers.tick(5000);
  assert.deepEqual(said().length, 6, "nothing is left to say");
  cleanup();
});

test("a frame that no other one follows is acknowledged half a second later", () => {
  const { model, cleanup } = open();
  const said = () => model.sent.filter((one) => one.k === "ack").map((one) => one.seq);
  model.frame(FIRST);
  page.tick();
  model.frame(delta([], { seq: 1 }));
  page.tick();
  // What has come and is on no screen yet is not said to be.
  model.frame(delta([], { seq: 2 }));
  mock.timers.tick(499);
  assert.deepEqual(said(), [0]);
  mock.timers.tick(1);
  assert.deepEqual(said(), [0, 1]);
  page.tick();
  mock.timers.tick(500);
  assert.deepEqual(said(), [0, 1, 2]);
  cleanup();
});

test("two views of a model draw the same frames and acknowledge them once", () => {
  const { model, el, widget, cleanup } = open();
  const second = page.document.createElement("div");
  page.document.body.append(second);
  const endSecond = widget.render({ model, el: second });
  model.frame(FIRST);
  model.frame(delta([], { rows: [{ id: "a", add: " and" }] }));
  page.tick();
  for (const view of [el, second]) assert.ok(view.textContent.includes("Say something yes and"));
  assert.equal(model.kinds().filter((kind) => kind === "ack").length, 1);
  endSecond();
  cleanup();
});

test("when nobody takes a command any more the view says so", () => {
  const { model, el, cleanup, pill } = open({ commands: ["pause"] });
  model.frame(FIRST);
  page.tick();
  model.send = () => {
    throw new Error("Comm is disposed");
  };
  page.key(el.querySelector(".lms"), " ");
  page.tick();
  assert.equal(pill(), "Disconnected");
  cleanup();
});

test("unknown messages are ignored", () => {
  const { model, el, cleanup } = open();
  for (const message of [
    null,
    undefined,
    7,
    "full",
    {},
    { k: "later" },
    { k: "reply", id: 99, ok: true },
  ]) {
    model.emit("msg:custom", message, []);
  }
  assert.deepEqual(el.lmscopeTest.errors, []);
  cleanup();
});

test("buttons are there only for what Python takes, and show their effect at once", () => {
  const { model, el, cleanup, pill } = open({ commands: ["pause", "resume", "step"] });
  model.frame(FIRST);
  page.tick();
  const button = el.querySelector('[aria-label="Pause"]');
  page.point(button, "click");
  assert.deepEqual(model.sent.at(-1), { k: "command", id: 1, op: "pause", arg: null });
  assert.equal(button.getAttribute("aria-label"), "Resume");
  assert.equal(pill(), "Live");
  cleanup();

  const plain = open();
  assert.ok(plain.el.querySelector('[aria-label="Pause"]').hidden);
  page.key(plain.el.querySelector(".lms"), " ");
  assert.ok(!plain.model.kinds().includes("command"));
  plain.cleanup();
});

test("a click keeps its effect until Python shows it, or refuses", () => {
  const { model, el, cleanup } = open({ commands: ["pause", "resume"] });
  const words = () => el.querySelector(".lms-d-pause").textContent.trim();
  const later = (seq, phase) => {
    model.frame(delta([], { seq, step: seq, phase }));
    page.tick();
  };
  model.frame(FIRST);
  page.tick();
  page.point(el.querySelector(".lms-d-pause"), "click");
  later(1, "live");
  assert.equal(words(), "Resume");
  later(2, "paused");
  later(3, "live");
  assert.equal(words(), "Pause");
  page.point(el.querySelector(".lms-d-pause"), "click");
  model.emit("msg:custom", { k: "reply", id: 2, ok: false, error: "no engine" }, []);
  page.tick();
  assert.equal(words(), "Pause");
  page.point(el.querySelector(".lms-d-pause"), "click");
  mock.timers.tick(2000);
  later(4, "live");
  assert.equal(words(), "Pause");
  cleanup();
});

test("a command without an answer for half a second says what to do", () => {
  const { model, el, cleanup, pill } = open({ commands: ["pause"] });
  model.frame(FIRST);
  page.tick();
  page.key(el.querySelector(".lms"), " ");
  mock.timers.tick(499);
  page.tick();
  assert.equal(pill(), "Live");
  mock.timers.tick(1);
  page.tick();
  assert.equal(pill(), "cell is running: use Interrupt");
  model.emit("msg:custom", { k: "reply", id: 1, ok: true, error: "" }, []);
  page.tick();
  assert.equal(pill(), "Live");
  cleanup();
});

test("a command that was answered in time says nothing later", () => {
  const { model, el, cleanup, pill } = open({ commands: ["pause"] });
  model.frame(FIRST);
  page.key(el.querySelector(".lms"), " ");
  mock.timers.tick(100);
  model.emit("msg:custom", { k: "reply", id: 1, ok: true, error: "" }, []);
  mock.timers.tick(1000);
  page.tick();
  assert.equal(pill(), "Live");
  cleanup();
});

test("a refused command says why", () => {
  const { model, el, cleanup } = open({ commands: ["step"] });
  model.frame(FIRST);
  page.key(el.querySelector(".lms"), "ArrowRight");
  model.emit("msg:custom", { k: "reply", id: 1, ok: false, error: "nothing to run" }, []);
  page.tick();
  assert.equal(el.querySelector(".lms-note").textContent, "nothing to run");
  cleanup();
});

test("when the kernel goes the picture stays, in grey, with one sentence", () => {
  const { model, el, cleanup, pill } = open();
  model.frame(FIRST);
  page.tick();
  model.emit("comm_live_update");
  page.tick();
  assert.equal(pill(), "Disconnected");
  assert.match(
    el.querySelector(".lms-banner").textContent,
    /The kernel has gone.*last picture, step 0/,
  );
  assert.ok(el.querySelector(".lms").classList.contains("lms-stale"));
  assert.ok(el.textContent.includes("Say something yes"));
  cleanup();
});

const titles = (el) =>
  [...el.querySelectorAll(".lms-panel")]
    .filter((panel) => !panel.hidden)
    .map((panel) => panel.getAttribute("aria-label"));

test("views are shown alone, or several in any order", () => {
  const { model, el, cleanup } = open({ views: ["requests", "blocks"] });
  model.frame(FIRST);
  page.tick();
  assert.deepEqual(titles(el), ["Requests", "Blocks"]);
  model.traits.views = ["tokens"];
  model.emit("change:views");
  page.tick();
  assert.deepEqual(titles(el), ["Tokens"]);
  assert.equal(el.querySelector(".lms-p-tok").style.gridColumn, "span 24");
  model.traits.views = [];
  model.emit("change:views");
  page.tick();
  assert.equal(titles(el).length, VIEWS.length);
  cleanup();
});

/** A run of a view, a frame for each of the steps given. */
function run(steps, traits = {}) {
  const opened = open(traits);
  const { model } = opened;
  steps.forEach((step, seq) => {
    const shared = { seq, step, at: 4, boundary: "RequestOutput", stat: { ...STAT, used: step } };
    const text = `${step}`;
    const rows = seq === 0 ? [row("a", { text })] : [{ id: "a", text }];
    const blocks = [NULL_BLOCK, [0, 1, 1, 2], EMPTY_BLOCK];
    const log = seq === 0 ? [] : between(steps[seq - 1], step);
    model.frame(
      seq === 0 ? full(blocks, { ...shared, rows }) : delta([], { ...shared, rows, log }),
    );
  });
  page.tick();
  const root = opened.el.querySelector(".lms");
  return {
    ...opened,
    key: (key) => {
      page.key(root, key);
      page.tick();
    },
    text: () => opened.el.querySelector(".lms-earlier").textContent,
    used: () => opened.el.querySelector(".lms-stat b").textContent,
    commands: () =>
      model.sent.filter((message) => message.k === "command").map(({ op, arg }) => [op, arg]),
  };
}

function between(from, to) {
  return Array.from({ length: to - from - 1 }, (_, k) => {
    const step = from + k + 1;
    return [step, step, step, ...LOG_NAMES.map((name) => (name === "used" ? step : 0)), []];
  });
}

test("looking back shows what was, while the engine goes on, and End returns", () => {
  const { model, el, cleanup, pill, key, text, used } = run([0, 1, 2, 3]);
  assert.deepEqual([pill(), text()], ["Live", "3"]);
  key("ArrowLeft");
  key("ArrowLeft");
  assert.deepEqual([pill(), text(), used()], ["Looking back, step 1 of 3", "1", "1/2"]);
  model.frame(delta([], { seq: 4, step: 4, rows: [{ id: "a", text: "4" }] }));
  page.tick();
  assert.deepEqual([pill(), text()], ["Looking back, step 1 of 4", "1"]);
  key("ArrowRight");
  assert.equal(text(), "2");
  key("End");
  assert.deepEqual([pill(), text()], ["Live", "4"]);
  key("Home");
  assert.equal(text(), "0");
  page.point(el.querySelector(".lms-pill"), "click");
  page.tick();
  assert.deepEqual([pill(), text()], ["Live", "4"]);
  cleanup();
});

test("a step that had no frame has its own counts, and says where the rest is from", () => {
  const { el, cleanup, pill, key, text, used } = run([0, 1, 5]);
  key("ArrowLeft");
  key("ArrowLeft");
  assert.deepEqual([pill(), text(), used()], ["Looking back, step 3 of 5", "1", "3/2"]);
  assert.match(el.querySelector(".lms-note").textContent, /Of step 3 only the counts.*step 1/);
  cleanup();
});

test("the arrows move a paused engine only from its last step on", () => {
  const { cleanup, key, commands } = run([0, 1, 2], { commands: ["pause", "resume", "step"] });
  key("ArrowRight");
  key(".");
  key("ArrowLeft");
  key("ArrowRight");
  key(",");
  key(".");
  assert.deepEqual(commands(), [
    ["step", "RequestOutput"],
    ["step", null],
  ]);
  cleanup();
});

test("a replay is moved by Python, and its later steps stay", () => {
  const traits = { commands: ["pause", "resume", "step", "seek", "back"], steps: [0, 9] };
  const { model, el, cleanup, key, commands, text } = run([0, 1, 2], traits);
  key("ArrowLeft");
  key(",");
  key("Home");
  assert.deepEqual(commands(), [
    ["seek", 1],
    ["back", null],
    ["seek", 0],
  ]);
  const rows = [row("a", { text: "again" })];
  model.frame(full([NULL_BLOCK, EMPTY_BLOCK], { epoch: 2, seq: 0, step: 1, rows }));
  page.tick();
  assert.equal(text(), "again");
  key("T");
  assert.equal(el.querySelector(".lms-p-time .lms-table tbody").children.length, 2);
  key("End");
  assert.deepEqual(commands().at(-1), ["seek", 2]);
  cleanup();
});

test("a replay's speed is chosen from a list, and shown as Python tells it", () => {
  const { model, el, cleanup, commands } = run([0, 1], { commands: ["speed"], steps: [0, 9] });
  const speed = el.querySelector(".lms-speed");
  speed.value = "4";
  speed.dispatchEvent(new page.window.Event("change"));
  assert.deepEqual(commands(), [["speed", 4]]);
  model.frame(delta([], { seq: 2, step: 1, speed: 3 }));
  assert.equal(speed.value, "3");
  cleanup();
  const plain = open();
  assert.ok(plain.el.querySelector(".lms-speed").hidden);
  plain.cleanup();
});

test("B sets and takes a breakpoint at the kind of struct the engine stands at", () => {
  const { model, cleanup, key, commands } = run([0, 1], { commands: ["break", "unbreak"] });
  key("b");
  model.frame(delta([], { seq: 2, step: 1, at: 4, breaks: [["RequestOutput", 4, true]] }));
  key("B");
  assert.deepEqual(commands(), [
    ["break", "RequestOutput"],
    ["unbreak", "RequestOutput"],
  ]);
  cleanup();
});

test("a stop at a breakpoint opens the debugger where there are tabs", () => {
  page.close();
  page = openPage({ width: 800 });
  const { model, el, cleanup } = run([0, 1]);
  assert.deepEqual(titles(el).at(-2), "Tokens");
  const breaks = [["preemption", 1, true]];
  model.frame(delta([], { seq: 2, step: 2, phase: "paused", breaks }));
  page.tick();
  page.tick();
  assert.ok(titles(el).includes("Debugger") && !titles(el).includes("Tokens"));
  page.point([...el.querySelectorAll(".lms-tab")][0], "click");
  page.tick();
  assert.ok(titles(el).includes("Tokens") && !titles(el).includes("Debugger"));
  cleanup();
});

test("an engine that stands says which steps its device has run without it", () => {
  const { model, el, cleanup } = open();
  const banner = el.querySelector(".lms-banner");
  const words = "Step 1 is in flight: its tokens are still to come.";
  model.frame(FIRST);
  model.frame(delta([], { phase: "paused", in_flight: words }));
  page.tick();
  assert.equal(banner.hidden, false);
  assert.equal(banner.textContent, `Paused.${words}`);

  model.frame(delta([], { seq: 2, step: 2, phase: "paused" }));
  page.tick();
  assert.equal(banner.hidden, true);
  cleanup();
});

test("the header says what runs the engine, and how long a step kept its device busy", () => {
  const { model, el, cleanup } = open();
  model.frame(full([NULL_BLOCK], { stat: { ...STAT, step_ms: 4.51 } }));
  page.tick();
  const about = () => el.querySelector(".lms-model").textContent;
  assert.equal(about(), "demo · 1 blocks of 4 tokens · budget 32");
  assert.match(el.querySelector(".lms-stats").textContent, /4\.5 ms this step(?!,)/);

  const info = { ...INFO, num_blocks: 1, engine: "cuda, Triton kernels, async scheduling" };
  const stat = { ...STAT, step_ms: 4.51, device_ms: 3.14 };
  model.frame(full([NULL_BLOCK], { seq: 1, info, stat }));
  page.tick();
  assert.ok(about().endsWith(" · budget 32 · cuda, Triton kernels, async scheduling"), about());
  assert.match(el.querySelector(".lms-stats").textContent, /4\.5 ms this step, 3\.1 on the device/);
  cleanup();
});

test("the theme follows its trait", () => {
  const { model, el, cleanup } = open({ theme: "dark" });
  const root = el.querySelector(".lms");
  assert.equal(root.dataset.theme, "dark");
  model.traits.theme = "light";
  model.emit("change:theme");
  assert.equal(root.dataset.theme, "light");
  cleanup();
});

test("clean-up takes back listeners, timers, frames and elements", () => {
  const onDocument = countListeners(page.document);
  const { model, el, cleanup } = open({ commands: ["pause"] });
  model.frame(FIRST);
  assert.ok(model.count() > 3);
  assert.ok(globalThis.__lmscope_views.includes(el));
  page.key(el.querySelector(".lms"), " ");
  cleanup();
  assert.equal(model.count(), 0);
  assert.equal(onDocument(), 0);
  assert.equal(el.childNodes.length, 0);
  assert.equal(page.waiting, 0);
  assert.ok(!globalThis.__lmscope_views.includes(el));
  const before = model.sent.length;
  mock.timers.tick(5000);
  model.frame(FIRST);
  assert.equal(model.sent.length, before);
});

test("an output that is written anew ends the view it had, and no other", () => {
  const { model, el, widget, cleanup } = open();
  model.frame(FIRST);
  page.tick();
  const elsewhere = page.document.createElement("div");
  const scrolled = page.document.createElement("section");
  scrolled.append(elsewhere);
  const endElsewhere = widget.render({ model, el: elsewhere });
  assert.equal(globalThis.__lmscope_views.length, 2);

  el.remove();
  const again = page.document.createElement("div");
  const endAgain = widget.render({ model, el: again });
  assert.deepEqual(globalThis.__lmscope_views, [elsewhere, again]);
  assert.equal(el.children.length, 0);

  endAgain();
  endElsewhere();
  cleanup();
});

test("a packed frame is unpacked, and what follows does not overtake it", async () => {
  const { model, el, cleanup } = open();
  const { columns: _, ...header } = FIRST;
  const packed = deflateSync(JSON.stringify(header));
  const part = new DataView(packed.buffer, packed.byteOffset, packed.byteLength);
  model.emit("msg:custom", { k: "packed" }, [part, ...buffers(FIRST)]);
  model.frame(delta([], { rows: [{ id: "a", add: " and" }] }));
  assert.equal(el.lmscopeTest.frames, 0, "the second waits for the first");
  await until(() => el.lmscopeTest.frames === 2);
  page.tick();
  assert.deepEqual(model.sent.at(-1), { k: "ack", seq: 1, hidden: false, epoch: 1 });

  model.frame(delta([], { seq: 2, rows: [] }));
  assert.equal(el.lmscopeTest.frames, 3, "nothing waits any more, so it is taken at once");
  cleanup();
});

test("a packed frame that cannot be unpacked is reported and asked for again", async () => {
  const { model, el, cleanup } = open();
  model.frame(FIRST);
  model.emit("msg:custom", { k: "packed" }, [new DataView(new ArrayBuffer(9))]);
  await until(() => el.lmscopeTest.errors.length);
  assert.equal(el.lmscopeTest.errors.length, 1);
  assert.deepEqual(model.sent.at(-1), { k: "resync" });
  cleanup();
});
