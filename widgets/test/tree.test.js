import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { createLink } from "../src/core/link.js";
import { makeColours } from "../src/core/palette.js";
import { createTree } from "../src/tree.js";
import { placeTree, scaleMarks } from "../src/tree_layout.js";
import { drawTreeTable, treeSummary } from "../src/tree_words.js";
import { columns, delta, full, NULL_BLOCK, pictureOf, row } from "./frames.js";
import { assertHarmless, HOSTILE, openPage } from "./page.js";

const THEME = { colours: makeColours("light"), ui: "sans-serif", mono: "monospace", textSize: 12 };
let page;
beforeEach(() => {
  page = openPage({ width: 500 });
});
afterEach(() => page.close());

/** a and b share two blocks and part; behind a's the kept rest of c; d ends in the middle. */
const NODES = [
  [0, -1, 0, 2, "You are", ["a", "b", "d"]],
  [1, 0, 2, 3, "a tutor", ["a"]],
  [2, 0, 2, 1, "glass", ["b"]],
  [5, 1, 5, 4, "old words", [], "c"],
  [7, -1, 6, 1, "orphan", [], ""],
];
const rows = () => ["a", "b", "d", "w"].map((id, k) => row(id, { slot: k, arrived: k }));

const treeOf = (tree, more = {}) => pictureOf(full([NULL_BLOCK], { rows: rows(), tree, ...more }));

function viewOf(picture) {
  const root = page.document.createElement("div");
  page.document.body.append(root);
  const link = createLink();
  const view = createTree(root, link);
  const draw = () => view.update(picture, { theme: THEME, height: 300 });
  draw();
  return {
    ...{ root, link, view, draw, frame: root.querySelector(".lms-tree") },
    run: (id) => root.querySelector(`[data-node="${id}"]`),
    line: () => root.querySelector(".lms-tree-line").textContent,
  };
}

test("every branch has a row, and a band of a reader leads to its branch", () => {
  const { placed, rows: count, blocks } = placeTree(treeOf({ nodes: NODES }).tree);
  const found = Object.fromEntries(
    placed.map(({ node, row, rows, bands, ends }) => [node.id, { row, rows, bands, ends }]),
  );
  assert.equal(count, 5);
  assert.equal(blocks, 9);
  assert.deepEqual(found[0], {
    ...{ row: 0, rows: 4, ends: ["d"] },
    bands: [
      ["a", 1],
      ["b", 3],
      ["d", 0],
    ],
  });
  assert.deepEqual(found[1], { row: 1, rows: 2, bands: [["a", 1]], ends: ["a"] });
  assert.deepEqual([found[5].row, found[5].bands], [2, []]);
  assert.equal(found[7].row, 4);
});

test("a node whose parent was cut off stands at the beginning", () => {
  const { placed } = placeTree(treeOf({ nodes: [[3, 99, 4, 1, "x", ["a"]]] }).tree);
  assert.equal(placed.length, 1);
});

test("marks of the scale are round numbers far enough apart", () => {
  assert.deepEqual(scaleMarks(36, 10, 40), [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]);
  assert.deepEqual(
    scaleMarks(1000, 0.4, 40),
    [0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000],
  );
});

test("a run is as wide as its blocks and as high as its branches", () => {
  const { run } = viewOf(treeOf({ nodes: NODES }));
  const px = (element, name) => Number.parseFloat(element.style[name]);
  assert.equal(px(run(1), "left"), px(run(0), "width") + 2);
  assert.ok(px(run(0), "height") > 3.5 * px(run(2), "height"));
  assert.ok(run(5).classList.contains("lms-kept"));
  const bands = [...run(0).querySelectorAll(".lms-band")];
  assert.deepEqual(
    bands.map((band) => band.style.background),
    [0, 1, 2].map((slot) => THEME.colours.owner(slot).tint),
  );
});

test("what was hit in this step has a bar in the band of its request, and a word", () => {
  const { root, run, line } = viewOf(
    treeOf(
      { nodes: NODES, hits: { 0: { b: 1 } } },
      { misses: { b: "missed from token 4: never seen" } },
    ),
  );
  const bars = [...run(0).querySelectorAll(".lms-hit")];
  assert.deepEqual(
    bars.map((bar) => bar.style.width),
    ["50%"],
  );
  const names = [...root.querySelectorAll(".lms-tree-name")].map((name) => name.textContent);
  assert.deepEqual(names, ["d", "a", "b reused 4"]);
  assert.equal(line(), " b missed from token 4: never seen");
});

test("waiting requests say what they would reuse, in dashes", () => {
  const { root } = viewOf(
    treeOf({
      nodes: NODES,
      waiting: [
        ["w", 1, 5],
        ["x", -1, 0],
      ],
    }),
  );
  const said = [...root.querySelectorAll(".lms-tree-next")].map((one) => one.textContent);
  assert.deepEqual(said, ["w would reuse 20 tokens", "x nothing to reuse"]);
  const chip = root.querySelector(".lms-dashed");
  page.point(chip, "pointerenter");
  assert.ok(root.querySelector('[data-node="1"]').classList.contains("lms-pointed"));
});

test("pointing at a run tells its tokens and readers, a click keeps one lit", () => {
  const { run, line, link, frame } = viewOf(treeOf({ nodes: NODES, note: "the tree is cut" }));
  assert.match(line(), /the tree is cut/);
  page.point(run(2), "pointerover");
  assert.equal(line(), "tokens 8 to 11 1 block, read by b · “glass”");
  assert.equal(link.lit, "b");
  page.point(run(5), "pointerover");
  assert.match(line(), /tokens 20 to 35 4 blocks, kept, no reader, stored by c/);
  page.point(run(5), "click");
  assert.equal(link.selected, "c");
  page.point(frame.firstChild, "pointerleave");
});

test("the lit request keeps its strength", () => {
  const { link, draw, run } = viewOf(treeOf({ nodes: NODES }));
  link.select("b");
  draw();
  const dim = [0, 1, 2, 5].map((id) => run(id).classList.contains("lms-dim"));
  assert.deepEqual(dim, [false, true, false, true]);
});

test("arrows go from run to run, Enter keeps its reader lit", () => {
  const { frame, line, link } = viewOf(treeOf({ nodes: NODES }));
  assert.ok(page.key(frame, "ArrowDown").defaultPrevented);
  assert.match(line(), /^tokens 0 to 7/);
  page.key(frame, "ArrowRight");
  assert.match(line(), /^tokens 8 to 19/);
  page.key(frame, "Enter");
  assert.equal(link.selected, "a");
  page.key(frame, "Escape");
  assert.ok(!line().startsWith("tokens"));
});

test("a run that grows keeps its element, one that is gone goes", () => {
  const picture = treeOf({ nodes: NODES });
  const { run, draw } = viewOf(picture);
  const kept = run(2);
  const frame = delta([], { tree: { nodes: [[2, 4]], gone: [5] } });
  picture.apply(frame, columns(frame));
  draw();
  assert.equal(picture.tree.nodes.get(2).count, 4);
  assert.equal(picture.tree.nodes.get(2).text, "glass");
  assert.equal(run(2), kept);
  assert.equal(run(5), null);
});

test("text and ids stay text", () => {
  const nodes = [
    [0, -1, 0, 2, HOSTILE, [HOSTILE]],
    [1, 0, 2, 1, HOSTILE, [], HOSTILE],
  ];
  const picture = treeOf({ nodes, waiting: [[HOSTILE, 0, 1]] }, { misses: { [HOSTILE]: HOSTILE } });
  const { root, run } = viewOf(picture);
  page.point(run(0), "pointerover");
  assertHarmless(root);
  const table = page.document.createElement("div");
  drawTreeTable(table, picture);
  assertHarmless(table);
  assert.equal(table.querySelectorAll("tbody tr").length, 2);
});

test("an empty tree says so", () => {
  const { root } = viewOf(treeOf({ nodes: [] }));
  assert.equal(root.querySelector(".lms-void").hidden, false);
  assert.equal(
    treeSummary(treeOf({ nodes: NODES })),
    "width: tokens, height: branches · 2 blocks shared · dashed: kept, no reader",
  );
});

test("clean-up leaves nothing", () => {
  const { root, view } = viewOf(treeOf({ nodes: NODES }));
  view.destroy();
  assert.equal(root.childNodes.length, 0);
});
