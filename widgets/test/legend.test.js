import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { makeColours } from "../src/core/palette.js";
import { createLegend } from "../src/legend.js";
import { openPage } from "./page.js";

const THEME = { colours: makeColours("light"), ui: "sans-serif", mono: "monospace", textSize: 12 };
let page;
beforeEach(() => {
  page = openPage();
});
afterEach(() => page.close());

test("it names the marks that have occurred in the views that are shown, and no others", () => {
  const root = page.document.createElement("div");
  const legend = createLegend(root);
  const words = (views) => {
    legend.update(new Set(["in_use", "kept", "decode", "preempted"]), THEME, views);
    return root.textContent;
  };
  const all = words(["timeline", "blocks", "debugger"]);
  assert.match(all, /kept for reuse/);
  assert.match(all, /preempted/);
  assert.doesNotMatch(all, /computed again/);
  assert.doesNotMatch(words(["timeline"]), /kept for reuse/);
  assert.doesNotMatch(words(["blocks"]), /preempted/);
  assert.equal(words(["tree"]), "Hue is a request.");
  assert.equal(words(["debugger"]), "");
});
