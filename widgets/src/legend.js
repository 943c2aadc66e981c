// @ts-check
/**
 * What the marks mean: only those that have occurred.
 */
import { percent } from "./attention.js";
import { drawBlock, drawQueueNumber } from "./block_cells.js";
import { mix } from "./core/colour.js";
import { h } from "./core/dom.js";
import { corner, freeze, hatch, outline, prepare, triangle } from "./core/draw.js";
import { EMPTY, IN_USE, KEPT, NULL } from "./core/picture.js";

/** @typedef {import("./core/theme.js").Theme} Theme */
/** @typedef {import("./core/draw.js").Box} Box */
/**
 * `ground` is that of blocks which are coloured by attention.
 * @typedef {(context: CanvasRenderingContext2D, box: Box, theme: Theme, ground?: Ground) => void} Sample
 */
/** @typedef {import("./core/palette.js").Ground} Ground */

const WIDTH = 24;
const SCALE = 96;
/** Of the grounds of attention, the one for samples of blocks. */
const MIDDLE = 4;
const HEIGHT = 16;

/**
 * @param {HTMLElement} root  an empty element
 */
export function createLegend(root) {
  let drawn = "";
  return {
    /**
     * @param {ReadonlySet<string>} occurred
     * @param {Theme} theme
     * @param {readonly string[]} [views]  names of the views that are shown
     * @param {{top: number} | null} [attention]  of blocks coloured by it: the largest share, 0
     *   where nobody measured it
     */
    update(occurred, theme, views = ["blocks", "timeline"], attention = null) {
      const key = [
        views.join(" "),
        [...occurred].sort(),
        theme.colours.name,
        theme.colours.background,
        theme.textSize,
        attention && percent(attention.top),
      ].join();
      if (key === drawn) return;
      drawn = key;
      const group = (
        /** @type {string} */ view,
        /** @type {string} */ title,
        /** @type {[string, string, Sample][]} */ marks,
      ) => {
        if (!views.includes(view)) return "";
        const shown = marks.filter(([name]) => occurred.has(name));
        return shown.length
          ? h(
              "span",
              { class: "lms-group" },
              h("b", {}, title),
              ...shown.map(([, words, sample]) =>
                entry(
                  words,
                  sample,
                  theme,
                  attention ? theme.colours.attention[MIDDLE] : undefined,
                ),
              ),
            )
          : "";
      };
      root.replaceChildren(
        // The debugger alone has no hues.
        views.some((view) => view !== "debugger")
          ? h("span", { class: "lms-group" }, h("b", {}, "Hue is a request."))
          : "",
        attention && views.includes("blocks") ? scale(attention.top, theme) : "",
        group("blocks", "Blocks", BLOCKS),
        group("timeline", "Steps", STEPS),
      );
    },
    destroy() {
      root.replaceChildren();
    },
  };
}

/**
 * All grounds of attention in a row. They go with the square root of the share, so the middle one
 * stands for a quarter of the largest.
 * @param {number} top
 * @param {Theme} theme
 */
function scale(top, theme) {
  const title = h("b", {}, "Ink is attention");
  if (!top) return h("span", { class: "lms-group" }, title, "not measured in this step");
  const { attention, lineSoft } = theme.colours;
  const canvas = h("canvas", { "aria-hidden": "true" });
  const context = prepare(canvas, SCALE, HEIGHT);
  if (context) {
    context.fillStyle = lineSoft;
    context.fillRect(0, 1, SCALE, HEIGHT - 2);
    attention.forEach(({ ground }, k) => {
      context.fillStyle = ground;
      context.fillRect((k * SCALE) / attention.length, 1, SCALE / attention.length, HEIGHT - 2);
    });
  }
  const quarter = `${percent(top / 4)} in the middle`;
  return h(
    "span",
    { class: "lms-group" },
    title,
    h(
      "span",
      { class: "lms-entry" },
      "0",
      freeze(canvas),
      `${percent(top)} of the step (${quarter})`,
    ),
  );
}

/**
 * @param {string} words
 * @param {Sample} sample
 * @param {Theme} theme
 * @param {Ground} [ground]
 */
function entry(words, sample, theme, ground) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const context = prepare(canvas, WIDTH, HEIGHT);
  if (context) sample(context, { x: 1, y: 1, w: WIDTH - 2, h: HEIGHT - 2 }, theme, ground);
  return h("span", { class: "lms-entry" }, freeze(canvas), words);
}

/**
 * @param {Partial<import("./block_cells.js").Block>} given
 * @param {number[]} [slots]
 * @returns {Sample}
 */
function cell(given, slots = [0]) {
  return (context, box, theme, ground) => {
    const block = {
      ...{ id: 1, state: IN_USE, name: "", ref: 1, fill: 2, size: 2, writtenFrom: null, text: "" },
      ...{ isHit: false, isEvicted: false, was: "", queue: 0, isDim: false, isCursor: false },
      owners: slots.map((slot) => theme.colours.owner(slot)),
      ...(ground ? { attention: (given.state ?? IN_USE) === IN_USE ? ground : null } : {}),
      ...given,
    };
    drawSample(context, box, block, theme);
  };
}

/**
 * A block without its words: they would not fit.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {import("./block_cells.js").Block} block
 * @param {Theme} theme
 */
function drawSample(context, box, block, theme) {
  context.save();
  const silent = new Proxy(context, {
    get(target, name) {
      const value = Reflect.get(target, name, target);
      if (name === "fillText") return () => {};
      return typeof value === "function" ? value.bind(target) : value;
    },
    set: (target, name, value) => Reflect.set(target, name, value, target),
  });
  drawBlock(silent, box, block, theme, "name");
  context.restore();
}

/**
 * @param {(theme: Theme) => string} fill
 * @returns {Sample}
 */
const bar = (fill) => (context, box, theme) => {
  context.fillStyle = fill(theme);
  context.fillRect(box.x + 2, box.y + 1, box.w - 6, box.h - 2);
};

/** Name in the history, words, sample. @type {[string, string, Sample][]} */
const BLOCKS = [
  ["in_use", "in use", cell({})],
  ["shared", "shared", cell({ ref: 2 }, [0, 1])],
  ["kept", "kept for reuse", cell({ state: KEPT })],
  ["empty", "empty", cell({ state: EMPTY, owners: [] })],
  ["null", "null", cell({ state: NULL, owners: [] })],
  ["hit", "just hit", cell({ isHit: true })],
  [
    "evicted",
    "just evicted",
    (context, box, theme, ground) => {
      cell({})(context, box, theme, ground);
      corner(context, box, theme.colours.trouble, 10);
    },
  ],
  [
    "next_loses",
    "next out, loses its content",
    (context, box, theme) =>
      drawQueueNumber(
        context,
        box.x + box.w / 2,
        box.y + box.h / 2,
        { queue: 1, state: KEPT },
        { ...theme, textSize: 11 },
      ),
  ],
  ["written", "written now", cell({ fill: 1, size: 2, writtenFrom: 0 })],
];

/** @type {[string, string, Sample][]} */
const STEPS = [
  ["decode", "decode", bar(({ colours }) => colours.work.decode)],
  ["prefill", "prefill", bar(({ colours }) => colours.work.prefill)],
  [
    "recompute",
    "computed again",
    (context, box, { colours }) => {
      const place = { x: box.x + 2, y: box.y + 1, w: box.w - 6, h: box.h - 2 };
      hatch(context, place, colours.work.recompute, 4);
      outline(context, place, colours.work.recompute, 1);
    },
  ],
  [
    "cached",
    "from cache, free",
    (context, box, { colours }) =>
      outline(
        context,
        { x: box.x + 2, y: box.y + 1, w: box.w - 6, h: box.h - 2 },
        colours.work.cached,
        1,
      ),
  ],
  [
    "in_use",
    "pool: used, kept",
    (context, box, { colours }) => {
      context.fillStyle = mix(colours.background, colours.work.decode, 0.6);
      context.fillRect(box.x, box.y + 6, 10, box.h - 6);
      context.fillStyle = mix(colours.background, colours.soft, 0.26);
      context.fillRect(box.x + 10, box.y + 2, 10, box.h - 2);
    },
  ],
  [
    "evicted",
    "eviction",
    (context, box, { colours }) => {
      context.fillStyle = colours.trouble;
      context.fillRect(box.x + 10, box.y + 2, 2, 6);
      context.fillStyle = colours.line;
      context.fillRect(box.x + 1, box.y + 8, box.w - 4, 1);
    },
  ],
  [
    "arrived",
    "arrived",
    (context, box, { colours }) => {
      context.fillStyle = colours.ink;
      context.fillRect(box.x + 10, box.y + 1, 1.5, box.h - 2);
    },
  ],
  [
    "cached",
    "starts on a reused prefix",
    (context, box, { colours }) => {
      context.fillStyle = colours.owner(0).hue;
      context.fillRect(box.x + 6, box.y + 2, box.w - 7, box.h - 4);
      context.fillStyle = colours.ink;
      context.fillRect(box.x + 2, box.y + 2, 1, box.h - 4);
      context.fillRect(box.x + 2, box.y + 2, 3, 1);
      context.fillRect(box.x + 2, box.y + box.h - 3, 3, 1);
    },
  ],
  [
    "waiting",
    "waiting",
    (context, box, { colours }) => {
      context.fillStyle = colours.soft;
      for (let x = box.x; x < box.x + box.w; x += 4) context.fillRect(x, box.y + box.h / 2, 2, 1.5);
    },
  ],
  [
    "preempted",
    "preempted",
    (context, box, { colours }) =>
      triangle(context, box.x + box.w / 2, box.y + 3, 5, colours.trouble),
  ],
  [
    "finished",
    "done",
    (context, box, { colours }) => {
      context.fillStyle = colours.ink;
      context.fillRect(box.x + 9, box.y + 1, 3, box.h - 2);
    },
  ],
];
