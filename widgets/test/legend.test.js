import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { makeColours } from "../src/core/palette.js";
import { createLegend } from "../src/legend.js";
import { openPage, recordingContext } from "./page.js";

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

test("samples are images where a canvas tells its pixels, and canvases where it does not", () => {
  const { prototype } = page.window.HTMLCanvasElement;
  const root = page.document.createElement("div");
  const kinds = (pixel) => {
    const context = { ...recordingContext(), getImageData: () => ({ data: pixel }) };
    prototype.getContext = () => context;
    prototype.toDataURL = () => "data:image/png;base64,AAAA";
    createLegend(root).update(new Set(["decode"]), THEME, ["timeline"]);
    return [...root.querySelectorAll("img, canvas")].map((element) => element.localName);
  };
  assert.deepEqual(kinds([7, 99, 3, 255]), ["canvas"]);
  assert.deepEqual(kinds([0x12, 0x34, 0x56, 255]), ["img"]);
  // A page that takes no images keeps its samples.
  root.querySelector("img").dispatchEvent(new page.window.Event("error"));
  assert.deepEqual(root.querySelectorAll("img").length, 0);
  assert.equal(root.querySelectorAll("canvas").length, 1);
});
