import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { describeBlock, namesOfSlots } from "../src/block_describe.js";
import { boxOf, layoutBlocks } from "../src/block_layout.js";
import { createBlockMap } from "../src/block_map.js";
import { createLink } from "../src/core/link.js";
import { makeColours } from "../src/core/palette.js";
import {
  binned,
  columns,
  delta,
  EMPTY_BLOCK,
  full,
  NULL_BLOCK,
  pictureOf,
  row,
  STAT,
} from "./frames.js";
import { countListeners, openPage, recordingContext } from "./page.js";

const THEME = { colours: makeColours("light"), ui: "sans-serif", mono: "monospace", textSize: 12 };
let page;
beforeEach(() => {
  page = openPage({ width: 584 });
});
afterEach(() => page.close());

/** Block 1 shared by a and b, 2 a's alone, 3 kept of old, 4 just evicted from old, 5 empty. */
function sample() {
  const blocks = [
    NULL_BLOCK,
    [0, 0x11, 2, 4],
    [0, 0x41, 1, 3],
    [7, 2, 0, 4],
    [1, 0x21, 1, 4],
    EMPTY_BLOCK,
  ];
  return pictureOf(
    full(blocks, {
      next: [3, 5],
      rows: [row("a", { slot: 0 }), row("b", { slot: 1 })],
      cells: [
        [1, ["a", "b"], "You are", "a", null, "beef"],
        [2, ["a"], "a tutor", null, null, null],
        [3, [], "old words", "old", null, "cafe"],
        [4, ["b"], "new words", null, "old", null],
      ],
    }),
  );
}

function mapOf(picture, link = createLink(), more = {}) {
  const root = page.document.createElement("div");
  page.document.body.append(root);
  const context = recordingContext();
  const tracker = picture.track();
  let redraws = 0;
  const map = createBlockMap(root, link, {
    ...more,
    context,
    redraw: () => {
      redraws++;
    },
  });
  const look = () => ({ theme: THEME, changes: tracker.take(), height: 292 });
  return {
    root,
    context,
    map,
    link,
    draw: () => map.update(picture, look()),
    redraws: () => redraws,
  };
}

const texts = (context) =>
  context.calls.filter((call) => call.name === "fillText").map((call) => call.args[0]);

test("a block says whose it is, how often it is held, its text and what is news", () => {
  const { context, draw } = mapOf(sample());
  assert.equal(draw(), 6);
  const words = texts(context);
  for (const expected of ["0 null", "×2", "You are", "a", "was old", "old", "2", "1"])
    assert.ok(words.includes(expected), expected);
});

test("shared blocks have a band per owner in their tints", () => {
  const { context, draw } = mapOf(sample());
  draw();
  const fills = new Set(
    context.calls.filter((call) => call.name === "fillRect").map((call) => call.fillStyle),
  );
  for (const slot of [0, 1]) {
    assert.ok(fills.has(THEME.colours.owner(slot).tint));
    assert.ok(fills.has(THEME.colours.owner(slot).hue));
  }
});

test("kept blocks are dashed in the hue of the one that stored them, hits have an ink outline", () => {
  const { context, draw, map } = mapOf(sample());
  draw();
  const strokes = context.calls.filter((call) => call.name === "strokeRect");
  const inBox = (block) => {
    const { x, y, w, h } = boxOf(map.layout, block);
    return strokes.filter(
      ({ args }) => args[0] >= x && args[0] <= x + w && args[1] >= y && args[1] <= y + h,
    );
  };
  assert.ok(
    inBox(3).some(
      (call) => call.dash.length === 2 && call.strokeStyle === THEME.colours.owner(7).edge,
    ),
  );
  assert.ok(
    inBox(1).some((call) => call.lineWidth === 2 && call.strokeStyle === THEME.colours.ink),
  );
  assert.ok(!inBox(2).some((call) => call.lineWidth === 2));
});

test("only blocks that changed are drawn again", () => {
  const picture = sample();
  const { context, draw, map } = mapOf(picture);
  draw();
  context.calls.length = 0;
  assert.equal(draw(), 0);
  assert.deepEqual(context.calls, []);
  const frame = delta([[5, 1, 0x41, 1, 1]], {
    next: [3],
    cells: [[5, ["b"], "now", null, null, null]],
  });
  picture.apply(frame, columns(frame));
  // Block 5 changed, and block 3 may have moved in the queue.
  assert.equal(draw(), 2);
  const cleared = context.calls
    .filter((call) => call.name === "clearRect")
    .map((call) => call.args);
  assert.deepEqual(
    cleared.map(String).sort(),
    [3, 5].map((block) => Object.values(boxOf(map.layout, block)).join()).sort(),
  );
  assert.ok(texts(context).includes("now"));
});

test("of 100,000 blocks only the cells of the changed ones are drawn again", () => {
  const blocks = Array.from({ length: 100_000 }, (_, k) => (k ? [k % 8, 1, 1, 4] : NULL_BLOCK));
  const picture = pictureOf(full(blocks));
  const { draw, map } = mapOf(picture);
  draw();
  assert.equal(map.layout.level, "bin");
  const frame = delta([
    [5, 1, 0x41, 1, 1],
    [99_999, 255, 0, 0, 0],
  ]);
  picture.apply(frame, columns(frame));
  assert.equal(draw(), 2);
});

test("the lit request keeps its strength, the others fade", () => {
  const picture = sample();
  const dim = (lit) =>
    [1, 2, 3, 4, 5].map(
      (block) => describeBlock(picture, block, THEME, lit, namesOfSlots(picture)).isDim,
    );
  assert.deepEqual(dim(null), [false, false, false, false, false]);
  assert.deepEqual(dim("a"), [false, false, true, true, true]);
  // It is lit where its content is kept and where it has just been lost.
  assert.deepEqual(dim("old"), [true, true, false, false, true]);
});

test("pointing at a block tells all about it and lights its only owner", () => {
  const picture = sample();
  const { draw, map, link, root, redraws } = mapOf(picture);
  draw();
  const point = (block) => {
    const box = boxOf(map.layout, block);
    page.point(map.canvas, "pointermove", box.x + 5, box.y + 5);
    draw();
    return root.querySelector(".lms-readout").textContent;
  };
  assert.match(point(2), /block 2 in use by a · 3 of 4 tokens · “a tutor”.*written in this step/);
  assert.equal(link.lit, "a");
  assert.match(point(1), /in use by a, b, 2 references.*hit in this step · hash beef/);
  assert.equal(link.lit, null);
  assert.match(point(3), /content kept, stored by old.*number 1 to be handed out/);
  assert.match(point(4), /evicted in this step, was old/);
  assert.match(point(5), /free and empty.*number 2 to be handed out/);
  assert.match(point(0), /null block/);
  assert.ok(redraws() >= 6);
  page.point(map.canvas, "pointerleave");
  draw();
  assert.match(root.querySelector(".lms-readout").textContent, /Point at a block/);
});

test("arrows move a cursor, Enter keeps its owner lit, Escape lets go", () => {
  const picture = sample();
  const { draw, map, link } = mapOf(picture);
  draw();
  assert.ok(page.key(map.canvas, "ArrowRight").defaultPrevented);
  assert.equal(map.cursor, 0);
  page.key(map.canvas, "ArrowRight");
  page.key(map.canvas, "ArrowRight");
  assert.equal(map.cursor, 2);
  page.key(map.canvas, "ArrowDown");
  assert.equal(map.cursor, Math.min(5, 2 + map.layout.cols));
  page.key(map.canvas, "ArrowUp");
  page.key(map.canvas, "Enter");
  assert.notEqual(link.selected, null);
  page.key(map.canvas, "Escape");
  assert.equal(map.cursor, null);
  for (let k = 0; k < 9; k++) page.key(map.canvas, "ArrowLeft");
  assert.equal(map.cursor, 0);
});

test("moving the cursor draws two cells", () => {
  const { draw, map } = mapOf(sample());
  draw();
  page.key(map.canvas, "ArrowRight");
  assert.equal(draw(), 1);
  page.key(map.canvas, "ArrowRight");
  assert.equal(draw(), 2);
});

test("the wheel zooms a map of small cells once it is chosen, and never else", () => {
  const blocks = Array.from({ length: 5000 }, (_, k) => (k ? [k % 8, 1, 1, 4] : NULL_BLOCK));
  const { draw, map } = mapOf(pictureOf(full(blocks)));
  draw();
  const wheel = (options) => {
    const event = new page.window.WheelEvent("wheel", {
      deltaY: -1,
      cancelable: true,
    });
    // happy-dom's wheel events know neither keys nor places.
    for (const [name, value] of Object.entries({
      clientX: 50,
      clientY: 50,
      ctrlKey: false,
      ...options,
    })) {
      Object.defineProperty(event, name, { value });
    }
    map.canvas.dispatchEvent(event);
    draw();
    return event.defaultPrevented;
  };
  assert.equal(wheel({}), false);
  assert.equal(map.layout.count, 5000);
  assert.equal(wheel({ ctrlKey: true }), true);
  assert.equal(map.layout.count, 3333);
  page.point(map.canvas, "dblclick");
  draw();
  assert.equal(map.layout.count, 5000);
});

test("the picture has a name that says what it holds", () => {
  const picture = sample();
  picture.stat = { ...STAT, used: 3, kept: 1, empty: 1, shared: 1, hits: 1, evicted: 1 };
  const { draw, map } = mapOf(picture);
  draw();
  assert.equal(map.canvas.getAttribute("role"), "img");
  assert.equal(
    map.canvas.getAttribute("aria-label"),
    "step 0: 3 in use, 1 shared · 1 kept · 1 empty · now 1 hit, 1 evicted",
  );
});

test("clean-up removes all listeners and elements", () => {
  const root = page.document.createElement("div");
  const listeners = countListeners(page.window.HTMLCanvasElement.prototype);
  const map = createBlockMap(root, createLink());
  assert.ok(listeners() > 3);
  map.destroy();
  assert.equal(listeners(), 0);
  assert.equal(root.childNodes.length, 0);
});

test("bins are drawn as they come: a stack in the hue of most, marks where something happened", () => {
  const bins = Array.from({ length: 2045 }, (_, k) => [k % 490, 0, k % 8, k === 7 ? 0x30 : 0]);
  const picture = pictureOf(binned("full", 489, bins));
  const { draw, map, context, root } = mapOf(picture);
  assert.equal(draw(), 2045);
  assert.equal(map.layout.perCell, 489);
  const frame = binned("delta", 489, [
    [3, 200, 100, 1, 0x10],
    [2044, 1, 0, 2, 0],
  ]);
  context.calls.length = 0;
  picture.apply(frame, columns(frame));
  assert.equal(draw(), 2);
  const fills = context.calls.filter((call) => call.name === "fillRect");
  assert.ok(fills.some((call) => call.fillStyle === THEME.colours.owner(1).small));
  const box = boxOf(map.layout, 3);
  page.point(map.canvas, "pointermove", box.x + 2, box.y + 2);
  draw();
  assert.match(
    root.querySelector(".lms-readout").textContent,
    /blocks 1,467 to 1,955 200 in use, 100 kept, 189 empty.*in bins/,
  );
});

test("a click on a bin asks for its blocks and shows them, Escape goes back", () => {
  const bins = Array.from({ length: 2045 }, () => [0, 0, 255, 0]);
  bins[3] = [2, 1, 1, 0x10];
  const picture = pictureOf(binned("full", 489, bins, { rows: [row("a", { slot: 1 })] }));
  const asked = [];
  const askWindow = (window) => asked.push(window);
  const { draw, map, context, root } = mapOf(picture, createLink(), { askWindow });
  draw();
  const box = boxOf(map.layout, 3);
  page.point(map.canvas, "pointermove", box.x + 2, box.y + 2);
  draw();
  assert.match(root.querySelector(".lms-readout").textContent, /click, or Enter.*single blocks/);
  page.point(map.canvas, "click", box.x + 2, box.y + 2);
  assert.deepEqual(asked, [{ first: 1467, count: 128 }]);
  draw();
  assert.equal(map.layout.level, "bin"); // they have not come yet

  const window = {
    ...{ first: 1467, count: 128 },
    blocks: [
      [1467, 1, 0x11, 1, 4],
      [1469, 1, 2, 0, 4],
    ],
    cells: [[1467, ["a"], "its text", "a", null, "beef"]],
  };
  const frame = binned("delta", 489, [], { window });
  assert.equal(picture.apply(frame, columns(frame)), "applied");
  context.calls.length = 0;
  assert.equal(draw(), 128);
  assert.deepEqual([map.layout.perCell, map.layout.first], [1, 1467]);
  assert.ok(texts(context).includes("1467"));
  const cell = boxOf(map.layout, 0);
  page.point(map.canvas, "pointermove", cell.x + 2, cell.y + 2);
  draw();
  assert.match(
    root.querySelector(".lms-readout").textContent,
    /block 1467.*in use by a.*its text.*beef/,
  );
  // A copy for looking back has the bins alone.
  assert.deepEqual([picture.clone().window, picture.clone().state.length], [null, 0]);

  map.canvas.dispatchEvent(new page.window.KeyboardEvent("keydown", { key: "Escape" }));
  assert.equal(asked.at(-1), null);
  draw();
  assert.equal(map.layout.level, "bin");
});

test("in a box with less room a cell stands for several bins", () => {
  const layout = layoutBlocks({ count: 1_000_000, width: 200, height: 100, bin: 489 });
  assert.equal(layout.perCell % 489, 0);
  assert.ok(layout.items * layout.perCell >= 1_000_000 && layout.height <= 100);
});
