// @ts-check
/**
 * Time as a picture: what each step did, and the cursor that says which step the views show.
 */
import { h, listen, setAttribute, setHidden } from "./core/dom.js";
import { font, prepare } from "./core/draw.js";
import { count } from "./core/format.js";
import { drawAxis, drawColumns, drawGround, redrawFrom } from "./timeline_draw.js";
import { cursorBox, entryAt, gutterLabels, laneAt, planTimeline } from "./timeline_layout.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/history.js").History} History */
/** @typedef {import("./core/link.js").Link} Link */
/** @typedef {import("./core/theme.js").Theme} Theme */
/** @typedef {import("./timeline_layout.js").Plan} Plan */

/** Of 255, as hexadecimal: how much of the ink lies over the step at the cursor. */
const VEIL = "0d";

/**
 * @param {HTMLElement} root  an empty element
 * @param {Link} link
 * @param {{onSeek?: (entry: number) => void, context?: CanvasRenderingContext2D}} [options]
 *   without `onSeek` the cursor follows the stream
 */
export function createTimeline(root, link, { onSeek, context: given } = {}) {
  const base = h("canvas", { class: "lms-time", role: "img", "aria-label": "steps" });
  // What changes with every step has a small canvas of its own, and the cursor none: the browser
  // copies a canvas as a whole.
  const axis = h("canvas", { class: "lms-time-axis", "aria-hidden": "true" });
  const frame = h("i", { class: "lms-time-cursor", "aria-hidden": "true" });
  const stack = h("div", { class: "lms-stack" }, base, axis, frame);
  root.append(stack);
  /** @type {(() => void)[]} */
  const cleanups = [];
  /** @type {Plan | null} */
  let plan = null;
  /** @type {History | null} */
  let history = null;
  /** @type {CanvasRenderingContext2D | null} */
  let ground = null;
  /** @type {CanvasRenderingContext2D | null} */
  let axisGround = null;
  let drawnKey = "";
  let drawnCursor = "";
  /** The entries as they were drawn. @type {import("./core/history.js").Entry[]} */
  let drawn = [];
  let isDragging = false;

  /**
   * @param {Picture} picture
   * @param {{theme: Theme, history: History, cursor: number, isNarrow: boolean, isLive: boolean}} look
   */
  function update(picture, look) {
    const { theme, cursor } = look;
    history = look.history;
    const width = root.clientWidth || Number.parseInt(root.style.width, 10) || 0;
    if (!width) return;
    const budget = picture.info?.max_num_batched_tokens || 1;
    const { colours, textSize } = theme;
    const numBlocks = Math.max(1, picture.numBlocks - 1);
    const { isNarrow } = look;
    const { mostWaiting } = history;
    const words = gutterLabels({ budget, numBlocks, mostWaiting, isNarrow });
    plan = planTimeline({ ...look, width, textSize, budget, gutter: widest(words, theme) });
    const key = [
      ...[width, plan.height, plan.column, plan.scale, plan.left, textSize, history.dropped],
      ...[history.mostWaiting, link.lit, colours.name, colours.background, theme.ui],
      ...[globalThis.devicePixelRatio, plan.shown.map((lane) => `${lane.id} ${lane.slot}`)],
    ].join();
    const isSame = key === drawnKey && drawn.length <= history.length;
    const from = isSame ? firstChanged(history.entries) : 0;
    if (!isSame) {
      ground = given ?? prepare(base, width, plan.height);
      axisGround = given ?? prepare(axis, width, plan.axis);
      stack.style.height = `${plan.height}px`;
      stack.style.setProperty("--lms-veil", `${colours.ink}${VEIL}`);
    }
    if (ground && from < history.length) {
      const scene = { context: ground, plan, theme, history, budget, numBlocks, lit: link.lit };
      // A column that has been drawn cannot be added to: it is cleared first.
      const isNew = from === drawn.length && from % plan.perColumn === 0 && isSame;
      const column = Math.floor(from / plan.perColumn);
      if (isNew) drawColumns(scene, column);
      else redrawFrom(scene, isSame ? column : 0);
    } else if (ground && !isSame) {
      drawGround({ context: ground, plan, theme, history, budget, numBlocks, lit: link.lit });
    }
    if (!isSame) drawnCursor = "";
    drawnKey = key;
    drawn = history.entries.slice();
    showCursor(theme, cursor);
    setAttribute(base, "aria-label", `${stepSummary(picture, history, cursor)}`);
  }

  /**
   * The first entry that is another one than was drawn; only those at the end change.
   * @param {import("./core/history.js").Entry[]} entries
   */
  function firstChanged(entries) {
    let first = drawn.length;
    while (first > 0 && drawn[first - 1] !== entries[first - 1]) first--;
    return first;
  }

  /**
   * @param {string[]} words
   * @param {Theme} theme
   */
  function widest(words, theme) {
    const context = given ?? base.getContext("2d");
    if (!context) return 0;
    context.font = font(theme, 11);
    return Math.max(...words.map((text) => context.measureText(text).width));
  }

  /**
   * @param {Theme} theme
   * @param {number} cursor
   */
  function showCursor(theme, cursor) {
    if (!plan || !history || given) return;
    const entry = history.entries[cursor];
    const key = `${cursor} ${entry?.step} ${drawnKey}`;
    if (key === drawnCursor) return;
    drawnCursor = key;
    const box = entry ? cursorBox(plan, cursor) : null;
    if (axisGround)
      drawAxis(
        { context: axisGround, plan, theme, history },
        box && entry ? { ...box, step: entry.step } : null,
      );
    setHidden(frame, box === null);
    if (!box) return;
    frame.style.left = `${box.from}px`;
    frame.style.width = `${box.to - box.from}px`;
    frame.style.top = `${plan.axis - 2}px`;
  }

  /** @param {PointerEvent} event */
  function pointOf(event) {
    const bounds = base.getBoundingClientRect();
    return { x: event.clientX - bounds.left, y: event.clientY - bounds.top };
  }

  /** @param {PointerEvent} event */
  function seek(event) {
    if (!plan || !history) return;
    const entry = entryAt(plan, Math.max(pointOf(event).x, plan.left), history.length);
    if (entry !== null) onSeek?.(entry);
  }

  if (onSeek) stack.classList.add("lms-seek");
  listen(cleanups, stack, "pointerdown", (/** @type {PointerEvent} */ event) => {
    if (!plan || event.button !== 0) return;
    const { x, y } = pointOf(event);
    const lane = laneAt(plan, y);
    if (x < plan.left || !onSeek) {
      if (lane) link.toggle(lane.id);
      return;
    }
    isDragging = true;
    stack.setPointerCapture?.(event.pointerId);
    seek(event);
  });
  listen(cleanups, stack, "pointermove", (event) => {
    if (isDragging) seek(event);
    else if (plan) link.hover(laneAt(plan, pointOf(event).y)?.id ?? null);
  });
  listen(cleanups, stack, "pointerup", () => {
    isDragging = false;
  });
  listen(cleanups, stack, "pointercancel", () => {
    isDragging = false;
  });
  listen(cleanups, stack, "pointerleave", () => link.hover(null));

  return {
    update,
    /** The plan drawn last. */
    get plan() {
      return plan;
    },
    destroy() {
      for (const cleanup of cleanups) cleanup();
      stack.remove();
    },
  };
}

/**
 * What the step at the cursor did, for the title of the panel.
 * @param {Picture} picture
 * @param {History} history
 * @param {number} cursor
 */
export function stepSummary(picture, history, cursor) {
  const entry = history.entries[cursor];
  if (!entry) return "";
  const { stat } = entry;
  const budget = picture.info?.max_num_batched_tokens ?? 0;
  const kinds = [
    stat.decode && `${count(stat.decode)} decode`,
    stat.prefill && `${count(stat.prefill)} prefill`,
    stat.recompute && `${count(stat.recompute)} computed again`,
  ].filter(Boolean);
  return [
    `step ${count(entry.step)}: ${count(stat.scheduled)} of ${count(budget)} tokens`,
    kinds.join(", "),
    stat.cached ? `${count(stat.cached)} more from the cache` : "",
    entry.preempted.length ? `${entry.preempted.join(", ")} preempted` : "",
  ]
    .filter(Boolean)
    .join(" · ");
}
