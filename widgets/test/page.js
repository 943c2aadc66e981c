/**
 * A page to test in: happy-dom's document as globals, element sizes as told.
 */
import assert from "node:assert/strict";
import { Window } from "happy-dom";

/** What a model might write. */
export const HOSTILE = `<img src=x onerror="alert(1)"><script>alert(2)</script>&amp;\u202e\u0000`;

/** That `root` shows the hostile text, as text. */
export function assertHarmless(root) {
  assert.equal(root.querySelectorAll("img, script").length, 0);
  assert.ok(root.textContent.includes("<img src=x onerror"), root.textContent);
  assert.ok(root.textContent.includes("<U+202E><0x00>"));
  assert.ok(!root.textContent.includes("\u202e"));
  for (const element of root.querySelectorAll("*")) {
    for (const { name, value } of element.attributes) {
      assert.ok(!name.startsWith("on"), name);
      if (name === "title") assert.ok(!value.includes("\u202e"), value);
    }
  }
}

/**
 * Waits until `condition()` holds, for what the page's own threads do (unpacking). Its limit only
 * keeps a test from hanging, and runs by a clock that mocked timers leave alone.
 */
export async function until(condition) {
  const limit = performance.now() + 30_000;
  while (!condition()) {
    assert.ok(performance.now() < limit, `30 s have not brought ${condition}`);
    await new Promise((resolve) => setImmediate(resolve));
  }
}

const NAMES = [
  ...["document", "window", "Node", "HTMLElement", "MutationObserver", "getComputedStyle"],
  ...["location", "getSelection", "requestAnimationFrame", "cancelAnimationFrame"],
];

/** Opens a page `width` px wide; `close()` puts the globals back. */
export function openPage({ width = 1200 } = {}) {
  const window = new Window({ url: "http://localhost/" });
  const before = NAMES.map((name) => [name, Object.getOwnPropertyDescriptor(globalThis, name)]);
  const frames = [];
  const own = {
    requestAnimationFrame: (callback) => frames.push(callback),
    cancelAnimationFrame: (id) => {
      frames[id - 1] = undefined;
    },
  };
  for (const name of NAMES) {
    const value = name === "window" ? window : (own[name] ?? window[name]);
    const bound =
      typeof value === "function" && name.startsWith("get") ? value.bind(window) : value;
    Object.defineProperty(globalThis, name, { value: bound, configurable: true, writable: true });
  }
  Object.defineProperty(window.HTMLElement.prototype, "clientWidth", {
    configurable: true,
    get: () => width,
  });
  return {
    window,
    document: window.document,
    /** Runs what waits for the next animation frame. */
    tick() {
      for (const callback of frames.splice(0)) callback?.(0);
    },
    get waiting() {
      return frames.filter(Boolean).length;
    },
    close() {
      for (const [name, descriptor] of before) {
        if (descriptor) Object.defineProperty(globalThis, name, descriptor);
        else delete globalThis[name];
      }
      window.close();
    },
    key(target, key, options = {}) {
      const event = new window.KeyboardEvent("keydown", {
        key,
        bubbles: true,
        cancelable: true,
        ...options,
      });
      target.dispatchEvent(event);
      return event;
    },
    point(target, type, x = 0, y = 0, options = {}) {
      const event = new window.MouseEvent(type, {
        clientX: x,
        clientY: y,
        bubbles: true,
        cancelable: true,
        ...options,
      });
      target.dispatchEvent(event);
      return event;
    },
  };
}

/** A 2D context that draws nothing and remembers all calls, with the styles they had. */
export function recordingContext() {
  const calls = [];
  const styles = {
    globalAlpha: 1,
    fillStyle: "",
    strokeStyle: "",
    lineWidth: 1,
    font: "",
    textAlign: "left",
    textBaseline: "middle",
  };
  const methods = [
    "fillRect",
    "strokeRect",
    "clearRect",
    "fillText",
    "beginPath",
    "moveTo",
    "lineTo",
    "closePath",
    "fill",
    "stroke",
    "arc",
    "roundRect",
    "rect",
    "clip",
    "save",
    "restore",
    "setLineDash",
    "setTransform",
  ];
  const context = { ...styles, calls, measureText: (text) => ({ width: [...text].length * 6 }) };
  let dash = [];
  for (const name of methods) {
    context[name] = (...args) => {
      if (name === "setLineDash") dash = args[0];
      const { globalAlpha, fillStyle, strokeStyle, lineWidth } = context;
      calls.push({ name, args, globalAlpha, fillStyle, strokeStyle, lineWidth, dash });
    };
  }
  return context;
}

/**
 * Counts listeners that are added through `target`, an element or a prototype, and not removed
 * again.
 */
export function countListeners(target) {
  let count = 0;
  const { addEventListener, removeEventListener } = target;
  target.addEventListener = function (...args) {
    count++;
    return addEventListener.apply(this, args);
  };
  target.removeEventListener = function (...args) {
    count--;
    return removeEventListener.apply(this, args);
  };
  return () => count;
}
