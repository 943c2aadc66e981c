import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { actionOf, HELP, listenToKeys } from "../src/core/keys.js";
import { createLink } from "../src/core/link.js";
import { openPage } from "./page.js";

let page;
beforeEach(() => {
  page = openPage();
});
afterEach(() => page.close());

function rootWithKeys(perform) {
  const root = page.document.createElement("div");
  page.document.body.append(root);
  const end = listenToKeys(root, perform);
  return { root, end };
}

test("keys do what the help says", () => {
  const found = [
    " ",
    "ArrowLeft",
    "ArrowRight",
    ",",
    ".",
    "B",
    "Home",
    "End",
    "e",
    "E",
    "[",
    "]",
    "T",
    "+",
    "-",
    "?",
    "Escape",
  ].map((key) => actionOf({ key }));
  assert.deepEqual(found, [
    "play",
    "back",
    "forward",
    "boundary_back",
    "boundary",
    "break",
    "first",
    "last",
    "event",
    "event_back",
    "request_back",
    "request",
    "tables",
    "larger",
    "smaller",
    "help",
    "release",
  ]);
  assert.equal(actionOf({ key: "q" }), null);
  assert.ok(HELP.length >= 8);
});

test("keys of the page stay the page's", () => {
  assert.equal(actionOf({ key: "e", ctrlKey: true }), null);
  assert.equal(actionOf({ key: "-", metaKey: true }), null);
});

test("no key reaches the notebook, whose command mode acts on letters", () => {
  const { root } = rootWithKeys(() => false);
  let reached = 0;
  page.document.addEventListener("keydown", () => reached++);
  for (const key of ["a", "x", "d", "Enter", "Escape", " "]) page.key(root, key);
  assert.equal(reached, 0);
  page.key(root, "Tab");
  page.key(root, "s", { ctrlKey: true });
  assert.equal(reached, 2);
});

test("only a key that did something is kept from scrolling the page", () => {
  const done = rootWithKeys(() => true);
  assert.equal(page.key(done.root, "Home").defaultPrevented, true);
  const idle = rootWithKeys(() => false);
  assert.equal(page.key(idle.root, "Home").defaultPrevented, false);
});

test("a focused button keeps Space, a slider its arrows", () => {
  const actions = [];
  const { root } = rootWithKeys((action) => actions.push(action) > 0);
  const button = page.document.createElement("button");
  const slider = page.document.createElement("input");
  root.append(button, slider);
  page.key(button, " ");
  page.key(slider, "ArrowLeft");
  page.key(slider, "Home");
  assert.deepEqual(actions, []);
  page.key(button, "e");
  page.key(slider, "e");
  assert.deepEqual(actions, ["event", "event"]);
});

test("after the end keys are the page's again", () => {
  const { root, end } = rootWithKeys(() => assert.fail("still listening"));
  end();
  page.key(root, "e");
});

test("a hover lights for a moment, a click keeps, Escape lets go", () => {
  const link = createLink();
  const seen = [];
  const end = link.subscribe(() => seen.push(link.lit));
  link.hover("a");
  link.hover("a");
  link.toggle("b");
  link.hover("c");
  link.hover(null);
  assert.deepEqual(seen, ["a", "b", "c", "b"]);
  assert.equal(link.release(), true);
  assert.equal(link.release(), false);
  assert.equal(link.lit, null);
  end();
  link.hover("a");
  assert.equal(seen.length, 5);
});
