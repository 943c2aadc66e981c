import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { History } from "../src/core/history.js";
import { createLink } from "../src/core/link.js";
import { makeColours } from "../src/core/palette.js";
import { latencyEdges, levelOf } from "../src/token_levels.js";
import { endOfPrompt } from "../src/token_line.js";
import { createTokens } from "../src/tokens.js";
import { columns, delta, full, NULL_BLOCK, pictureOf, row, STAT } from "./frames.js";
import { assertHarmless, HOSTILE, openPage } from "./page.js";

const THEME = { colours: makeColours("light"), ui: "sans-serif", mono: "monospace", textSize: 12 };
let page;
beforeEach(() => {
  page = openPage();
});
afterEach(() => page.close());

/** A row whose output is these texts; `more` per token: step, ms, chance, others, stall. */
function spoken(id, texts, more = [], rest = {}) {
  const tokens = texts.map((text, k) => [text.length, ...(more[k] ?? [k + 1, 10 * (k + 1)])]);
  return row(id, { text: texts.join(""), tokens, ...rest });
}

function viewOf(picture, options = {}) {
  const root = page.document.createElement("div");
  const corner = page.document.createElement("div");
  page.document.body.append(root, corner);
  const link = createLink();
  const history = new History();
  let redraws = 0;
  const view = createTokens(root, corner, link, { redraw: () => redraws++, ...options });
  const tracker = picture.track();
  const draw = () => {
    history.record(picture);
    view.update(picture, { theme: THEME, history, changes: tracker.take() });
  };
  draw();
  const tokens = () => [...root.querySelectorAll(".lms-token")];
  return {
    ...{ root, corner, link, view, draw, history, tokens, redraws: () => redraws },
    line: () => root.querySelector(".lms-tok-line").textContent,
    levels: () => tokens().map((token) => Number(token.dataset.level)),
    output: () => root.querySelector(".lms-output").textContent,
  };
}

test("the less probable a token was, the darker its ground", () => {
  const chances = [0.95, 0.9, 0.61, 0.3, 0.11, 0.1, 0.0];
  const levels = chances.map((chance) => levelOf({ chance, ms: null }, "chance", []));
  assert.deepEqual(levels, [0, 1, 1, 3, 3, 4, 4]);
  assert.equal(levelOf({ chance: null }, "chance", []), 0);
});

test("the longer a token took among those shown, the darker its ground", () => {
  const { rows } = pictureOf(
    full([NULL_BLOCK], { rows: [spoken("a", [..."abcdefghijk"], [[1, 999]])] }),
  );
  const edges = latencyEdges([...rows.values()]);
  assert.deepEqual(edges, [30, 50, 70, 90]);
  assert.deepEqual(
    [10, 30, 31, 70, 90, 91].map((ms) => levelOf({ ms }, "latency", edges)),
    [0, 0, 1, 2, 3, 4],
  );
  assert.deepEqual(latencyEdges([]), []);
});

test("it shows latency until a request brings probabilities, and changes on a click", () => {
  const plain = pictureOf(full([NULL_BLOCK], { rows: [spoken("a", [..."abcdefgh"])] }));
  const first = viewOf(plain);
  assert.equal(first.view.mode, "latency");
  assert.match(first.corner.textContent, /quick.*slow/);
  const chances = [[1, 5, 0.05], ...Array.from({ length: 7 }, (_, k) => [k + 2, 5, 0.99])];
  const picture = pictureOf(full([NULL_BLOCK], { rows: [spoken("a", [..."abcdefgh"], chances)] }));
  const { view, corner, levels, draw, redraws } = viewOf(picture);
  assert.equal(view.mode, "chance");
  assert.deepEqual(levels(), [4, 0, 0, 0, 0, 0, 0, 0]);
  assert.match(corner.textContent, /expected.*surprise/);
  page.point(corner.querySelector("button"), "click");
  assert.equal(redraws(), 1);
  draw();
  assert.equal(view.mode, "latency");
  assert.deepEqual(levels(), [0, 0, 0, 0, 0, 0, 0, 0]);
});

test("prompt, text from before, tokens and what is to come, in this order", () => {
  const waiting = spoken("a", ["old ", "new"], [[1, 1]], { state: "preempted" });
  waiting.tokens = waiting.tokens.slice(1);
  const { root, output } = viewOf(pictureOf(full([NULL_BLOCK], { rows: [waiting] })));
  const text = root.querySelector(".lms-ttext");
  assert.equal(text.textContent, "Say somethingold new …");
  assert.equal(output(), "new");
  assert.equal(root.querySelector(".lms-earlier").textContent, "old ");
});

test("tokens of this step are framed, a stall says what it cost", () => {
  const picture = pictureOf(
    full([NULL_BLOCK], {
      ...{ step: 6, at: 4 },
      rows: [
        spoken(
          "a",
          [" one", " two", "three"],
          [
            [1, 5],
            [5, 60, null, null, 3],
            [6, 5],
          ],
        ),
      ],
    }),
  );
  const { tokens } = viewOf(picture);
  assert.deepEqual(
    tokens().map((token) => token.classList.contains("lms-now")),
    [false, false, true],
  );
  assert.equal(tokens()[1].querySelector(".lms-stall").textContent, " 3 steps ");
  assert.ok(tokens()[1].querySelector(".lms-stall svg"));
  // The space before a word is not part of its ground.
  assert.equal(tokens()[0].querySelector(".lms-t").textContent, "one");
});

test("new tokens are added, those that are there keep their elements", () => {
  const picture = pictureOf(full([NULL_BLOCK], { rows: [spoken("a", ["a", "b"])] }));
  const { tokens, draw, output } = viewOf(picture);
  const before = tokens();
  const more = delta([], {
    rows: [
      {
        id: "a",
        add: "cd",
        tokens: [
          [1, 3, 1],
          [1, 4, 1],
        ],
      },
    ],
  });
  picture.apply(more, columns(more));
  draw();
  assert.equal(output(), "abcd");
  assert.deepEqual(tokens().slice(0, 2), before);
});

test("of a long text the last 96 tokens are drawn, of the chosen request 512", () => {
  const picture = pictureOf(full([NULL_BLOCK], { rows: [row("a", { text: "" }), row("b")] }));
  const { tokens, draw, link, root } = viewOf(picture);
  for (let k = 1; k <= 600; k++) {
    const frame = delta([], {
      seq: k,
      step: k,
      rows: [{ id: "a", add: "x", tokens: [[1, k, 1]] }],
    });
    picture.apply(frame, columns(frame));
    if (k % 50 === 0) draw();
  }
  assert.equal(tokens().length, 96);
  assert.ok(root.querySelector(".lms-prompt").hidden);
  assert.equal(root.querySelector(".lms-earlier").textContent, `…${"x".repeat(400)}`);
  link.select("a");
  draw();
  assert.equal(tokens().length, 512);
  const numbers = tokens().map((token) => Number(token.dataset.place));
  assert.deepEqual(
    numbers,
    [...numbers].sort((a, b) => a - b),
  );
});

test("tokens of a long text become plain text some at a time, so that the rest need not move", () => {
  const picture = pictureOf(full([NULL_BLOCK], { rows: [row("a", { text: "" })] }));
  const { tokens, draw, root } = viewOf(picture);
  const counts = [];
  for (let k = 1; k <= 162; k++) {
    const tokensOfStep = [[1, k, 1]];
    const frame = delta([], {
      seq: k,
      step: k,
      rows: [{ id: "a", add: "x", tokens: tokensOfStep }],
    });
    picture.apply(frame, columns(frame));
    draw();
    counts.push(tokens().length);
  }
  assert.deepEqual(counts.slice(94, 98), [95, 96, 97, 98]);
  assert.deepEqual(counts.slice(126, 130), [127, 128, 96, 97]);
  assert.deepEqual(counts.slice(160), [128, 96]);
  assert.equal(root.querySelector(".lms-earlier").textContent, "x".repeat(162 - 96));
});

test("pointing at a token tells its step, batch, time and what could have stood there", () => {
  const others = [
    ["two", 0.325],
    ["</b>", 0.0004],
  ];
  const picture = pictureOf(
    full([NULL_BLOCK], {
      ...{ step: 3, stat: { ...STAT, scheduled: 12 } },
      rows: [spoken("a", [" still"], [[3, 30.14, 0.125, others]]), row("b")],
    }),
  );
  const { tokens, line, link, root } = viewOf(picture);
  assert.match(line(), /Point at a token/);
  page.point(tokens()[0].querySelector(".lms-t"), "pointerover");
  assert.equal(
    line(),
    "“ still” a, step 3, a batch of 12 tokens · 30.1 ms after the token before" +
      "probability 12.5 %; instead: “two” 32.5 % · “</b>” below 0.1 %",
  );
  assert.equal(link.lit, "a");
  assert.ok(tokens()[0].classList.contains("lms-pointed"));
  page.point(root.querySelector(".lms-toks"), "pointerleave");
  assert.match(line(), /Point at a token/);
  assert.ok(!tokens()[0].classList.contains("lms-pointed"));
});

test("arrows go from token to token and from line to line, Enter keeps, Escape lets go", () => {
  const rows = [spoken("a", ["a1", "a2"]), spoken("b", ["b1", "b2"], [], { arrived: 1 })];
  const { root, line, link } = viewOf(pictureOf(full([NULL_BLOCK], { rows })));
  const list = root.querySelector(".lms-toks");
  const words = () => line().slice(1, 3);
  assert.ok(page.key(list, "ArrowRight").defaultPrevented);
  assert.equal(words(), "a2");
  page.key(list, "ArrowLeft");
  assert.equal(words(), "a1");
  page.key(list, "ArrowLeft");
  assert.equal(words(), "a1");
  page.key(list, "ArrowDown");
  assert.equal(words(), "b2");
  page.key(list, "Enter");
  assert.equal(link.selected, "b");
  page.key(list, "ArrowUp");
  assert.equal(words(), "a2");
  page.key(list, "Escape");
  assert.match(line(), /Point at a token/);
});

test("a double click goes to the step of a token", () => {
  const sought = [];
  const picture = pictureOf(full([NULL_BLOCK], { step: 1, rows: [spoken("a", ["x", "y"])] }));
  const { tokens, draw } = viewOf(picture, { onSeek: (entry) => sought.push(entry) });
  const frame = delta([], { step: 2 });
  picture.apply(frame, columns(frame));
  draw();
  for (const token of tokens()) page.point(token, "dblclick");
  assert.deepEqual(sought, [0, 1]);
});

test("what a model writes stays text: tokens, alternatives, prompts and ids", () => {
  const hostile = spoken(HOSTILE, [HOSTILE], [[0, 1, 0.5, [[HOSTILE, 0.5]]]], {
    prompt_text: HOSTILE,
  });
  const { root, tokens } = viewOf(pictureOf(full([NULL_BLOCK], { rows: [hostile] })));
  page.point(tokens()[0], "pointerover");
  assertHarmless(root);
  assert.ok(root.querySelector(".lms-tok-line").textContent.includes("instead: “<img"));
});

test("a long prompt begins with a whole word", () => {
  assert.equal(endOfPrompt("short"), "short");
  assert.equal(endOfPrompt(`rest of ${"x".repeat(120)}`), `… of ${"x".repeat(120)}`);
});

test("clean-up leaves nothing", () => {
  const { root, corner, view } = viewOf(pictureOf(full([NULL_BLOCK], { rows: [row("a")] })));
  view.destroy();
  assert.equal(root.childNodes.length + corner.childNodes.length, 0);
});
