import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import palette from "../lmscope_widgets/palette.json" with { type: "json" };
import { attentionWords, createColourSwitch, groundOf } from "../src/attention.js";
import { createBlockMap } from "../src/block_map.js";
import { drawBlockTable } from "../src/block_words.js";
import { contrast, parseColour } from "../src/core/colour.js";
import { columnsFromLists } from "../src/core/columns.js";
import { History } from "../src/core/history.js";
import { createLink } from "../src/core/link.js";
import { makeColours } from "../src/core/palette.js";
import { createDashboard } from "../src/dashboard.js";
import { createLegend } from "../src/legend.js";
import { binned, delta, EMPTY_BLOCK, full, NULL_BLOCK, pictureOf, row } from "./frames.js";
import { openPage, recordingContext } from "./page.js";

const THEME = { colours: makeColours("light"), ui: "sans-serif", mono: "monospace", textSize: 12 };
const [LITTLE, MOST] = [THEME.colours.attention[0].ground, THEME.colours.attention.at(-1).ground];
let page;
beforeEach(() => {
  page = openPage({ width: 584 });
});
afterEach(() => page.close());

const BLOCKS = [NULL_BLOCK, [0, 0x11, 2, 4], [0, 1, 1, 3], [1, 1, 1, 4], [7, 2, 0, 4], EMPTY_BLOCK];
const CELLS = [
  [1, ["a", "b"], "You are", "a", null, "beef"],
  [2, ["a"], "a tutor", null, null, null],
  [3, ["b"], "a pirate", null, null, null],
  [4, [], "old words", "old", null, "cafe"],
];

/** Block 1 has half of all attention, block 2 a quarter of that, block 3 next to none. */
function measured(more = {}) {
  const rows = [row("a", { slot: 0 }), row("b", { slot: 1 })];
  const mass = { top: 0.5, of: [1, 255, 2, 64] };
  return pictureOf(full(BLOCKS, { next: [4, 5], rows, cells: CELLS, mass, ...more }));
}

function mapOf(picture) {
  const root = page.document.createElement("div");
  page.document.body.append(root);
  const context = recordingContext();
  const tracker = picture.track();
  const map = createBlockMap(root, createLink(), { context });
  return {
    root,
    context,
    map,
    draw(colour = "attention") {
      context.calls.length = 0;
      return map.update(picture, { theme: THEME, changes: tracker.take(), height: 292, colour });
    },
  };
}

const fills = (context) =>
  context.calls.filter((call) => call.name === "fillRect").map((call) => call.fillStyle);

const lightness = (colour) => {
  const [r, g, b] = parseColour(colour).map((value) => {
    const v = value / 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  });
  // The first row of OKLab.
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return 0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s;
};

test("the grounds of attention go in even steps of lightness and have next to no hue", () => {
  for (const name of ["light", "dark"]) {
    const grounds = palette.attention[name];
    const steps = grounds.slice(1).map((ground, k) => lightness(ground) - lightness(grounds[k]));
    const mean = (lightness(grounds.at(-1)) - lightness(grounds[0])) / (grounds.length - 1);
    for (const step of steps) assert.ok(Math.abs(step / mean - 1) < 0.12, `${name} ${step}`);
    for (const ground of grounds) {
      const channels = parseColour(ground);
      assert.ok(Math.max(...channels) - Math.min(...channels) <= 20, `${name} ${ground}`);
    }
  }
});

test("text reads on every ground of attention, whatever the host's colours are", () => {
  for (const [name, host] of [
    ["light", {}],
    ["dark", {}],
    ["light", { background: "#ffffff", ink: "#212121" }],
    ["dark", { background: "#111111", ink: "#ffffff" }],
    ["dark", { background: "#1e1e1e", ink: "#d4d4d4" }],
  ])
    for (const { ground, text } of makeColours(name, host).attention)
      assert.ok(contrast(ground, text) >= 4.5, `${name} ${text} on ${ground}`);
});

test("the ground goes with the square root of the share", () => {
  const { colours } = THEME;
  assert.equal(groundOf(colours, 0), null);
  assert.equal(groundOf(colours, 1).ground, colours.attention[1].ground);
  assert.equal(groundOf(colours, 64), colours.attention[8], "a quarter is in the middle");
  assert.equal(groundOf(colours, 255).ground, MOST);
  assert.notEqual(MOST, LITTLE);
});

test("a picture keeps the mass of its frame, and loses it with the first frame without", () => {
  const picture = measured();
  assert.equal(picture.mass.top, 0.5);
  assert.deepEqual(
    [1, 2, 3].map((block) => picture.levelOf(block)),
    [255, 64, 0],
  );
  const copy = picture.clone();
  const next = delta([], { seq: 1, step: 1 });
  picture.apply(next, columnsFromLists(next));
  assert.equal(picture.mass, null);
  assert.equal(picture.levelOf(1), 0);
  assert.equal(copy.levelOf(1), 255, "a step looked back at shows its own");
});

test("what changed are the blocks whose level is another one", () => {
  const picture = measured();
  const tracker = picture.track();
  tracker.take();
  const next = delta([], { mass: { top: 0.4, of: [1, 255, 2, 80, 3, 9] } });
  picture.apply(next, columnsFromLists(next));
  assert.deepEqual([...tracker.take().mass].sort(), [2, 3]);
});

test("by attention a block has the ground of its share, and keeps its words and its owner's foot", () => {
  const { context, draw } = mapOf(measured());
  draw();
  const drawn = fills(context);
  assert.ok(drawn.includes(MOST));
  assert.ok(drawn.includes(THEME.colours.attention[8].ground));
  for (const slot of [0, 1]) {
    assert.ok(!drawn.includes(THEME.colours.owner(slot).tint), "no tint");
    assert.ok(drawn.includes(THEME.colours.owner(slot).hue), "the foot");
  }
  const texts = context.calls.filter((call) => call.name === "fillText");
  const id = texts.find((call) => call.args[0] === "1");
  assert.equal(id.fillStyle, THEME.colours.attention.at(-1).text);
  for (const words of ["×2", "You are", "a", "old"])
    assert.ok(
      texts.some((call) => call.args[0] === words),
      words,
    );
});

test("by owner nothing of it is drawn, and a new step draws no block for it", () => {
  const picture = measured();
  const { context, draw } = mapOf(picture);
  draw("owner");
  assert.ok(!fills(context).includes(MOST));
  const next = delta([], { next: [4, 5], mass: { top: 0.4, of: [3, 255] } });
  picture.apply(next, columnsFromLists(next));
  const news = draw("owner");
  const after = delta([], { seq: 2, next: [4, 5], mass: { top: 0.4, of: [1, 255] } });
  picture.apply(after, columnsFromLists(after));
  assert.equal(draw("owner"), news, "only the blocks that go out next");
});

test("a delta draws the blocks with another level and no others", () => {
  const picture = measured({ next: [] });
  const { draw } = mapOf(picture);
  assert.equal(draw(), 6);
  const same = delta([], { mass: { top: 0.4, of: [1, 255, 2, 64] } });
  picture.apply(same, columnsFromLists(same));
  assert.equal(draw(), 0);
  const other = delta([], { seq: 2, step: 2, mass: { top: 0.4, of: [1, 255, 3, 64] } });
  picture.apply(other, columnsFromLists(other));
  assert.equal(draw(), 2, "2 has lost it, 3 has got it");
});

test("the line under the map says the share of the block pointed at", () => {
  const picture = measured();
  assert.equal(attentionWords(picture, 1), "50.0 % of the step's attention");
  assert.equal(attentionWords(picture, 3), "next to none of the step's attention");
  assert.equal(attentionWords(picture, 5), "");
  assert.equal(attentionWords(measured({ mass: undefined }), 1), "");
  const { root, map, draw } = mapOf(picture);
  draw();
  page.key(map.canvas, "ArrowRight");
  page.key(map.canvas, "ArrowRight");
  draw();
  assert.match(root.textContent, /50\.0 % of the step's attention/);
});

test("bins have the level of their most attended block, single blocks of a window their own", () => {
  const bins = [
    [100, 0, 0, 0],
    [50, 0, 1, 0],
    [0, 0, 255, 0],
  ];
  const mass = { top: 0.25, of: [0, 255, 1, 16] };
  const frame = binned("full", 100, bins, { mass });
  const picture = pictureOf(frame);
  assert.equal(picture.levelOf(0, 100), 255);
  assert.equal(picture.levelOf(100, 200), 16);
  assert.equal(picture.levelOf(0, 300), 255);
  assert.match(attentionWords(picture, 0, 100), /a block of these gets 25\.0 %/);
  const tracker = picture.track();
  tracker.take();
  const window = { first: 96, count: 8, blocks: [[99, 0, 1, 1, 4]], cells: [], mass: [99, 64] };
  const next = binned("delta", 100, [], { seq: 1, window, mass: { top: 0.25, of: [0, 255] } });
  picture.apply(next, columnsFromLists(next));
  assert.deepEqual([...tracker.take().mass], [100], "the first block of the bin");
  assert.equal(picture.levelOf(99), 64);
  assert.equal(picture.levelOf(98), 0);
  assert.equal(picture.levelOf(0, 100), 255, "beyond the window the bin speaks");
});

test("the legend shows the scale by attention only", () => {
  const root = page.document.createElement("div");
  const legend = createLegend(root);
  const words = (attention) => {
    legend.update(new Set(["in_use"]), THEME, ["blocks"], attention);
    return root.textContent;
  };
  assert.doesNotMatch(words(null), /attention/);
  assert.match(words({ top: 0.421 }), /Ink is attention0.*42\.1 % of the step \(10\.5 %/);
  assert.match(words({ top: 0 }), /not measured in this step/);
});

test("the table has a column of shares where somebody measured them", () => {
  const table = page.document.createElement("div");
  drawBlockTable(table, measured());
  assert.match(table.querySelector("thead").textContent, /attention/);
  assert.match(table.querySelectorAll("tbody tr")[1].textContent, /50\.0 %/);
  drawBlockTable(table, measured({ mass: undefined }));
  assert.doesNotMatch(table.textContent, /attention/);
});

test("the switch says which colour is on", () => {
  const corner = page.document.createElement("span");
  let clicks = 0;
  const colour = createColourSwitch(corner, () => {
    clicks++;
  });
  const button = corner.querySelector("button");
  assert.ok(button.hidden);
  colour.update("attention", true);
  assert.ok(!button.hidden);
  assert.equal(corner.querySelector("[aria-current='true']").textContent, "attention");
  button.click();
  assert.equal(clicks, 1);
  colour.destroy();
  assert.equal(corner.children.length, 0);
});

test("a dashboard offers it once frames have it, on a click and with a key", () => {
  page.document.body.append(page.document.createElement("div"));
  const dashboard = createDashboard(page.document.body.lastChild, { theme: "light" });
  const show = (picture) => {
    const history = new History();
    history.record(picture);
    dashboard.update({ picture, history, cursor: 0 });
  };
  let button = null;
  const current = () => button.querySelector("[aria-current='true']")?.textContent;
  show(measured({ mass: undefined }));
  button = dashboard.root.querySelector(".lms-colour");
  assert.ok(button.hidden);
  assert.equal(dashboard.perform("colour"), false);
  show(measured());
  assert.ok(!button.hidden);
  assert.equal(current(), "owner");
  assert.equal(dashboard.perform("colour"), true);
  show(measured());
  assert.equal(current(), "attention");
  assert.match(dashboard.root.querySelector(".lms-legend").textContent, /50\.0 %/);
  button.click();
  show(measured());
  assert.equal(current(), "owner");
  dashboard.destroy();
});
