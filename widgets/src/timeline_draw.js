// @ts-check
/**
 * How the timeline looks: work against the budget, the pool, the queue, a lane per request.
 */

import { mix } from "./core/colour.js";
import { font, hatch, label, line, outline, triangle } from "./core/draw.js";
import { count } from "./core/format.js";
import { drawLane, drawLaneName } from "./timeline_lanes.js";
import { gutterLabels, xOf } from "./timeline_layout.js";

/** @typedef {import("./core/theme.js").Theme} Theme */
/** @typedef {import("./core/history.js").History} History */
/** @typedef {import("./core/history.js").Lane} Lane */
/** @typedef {import("./core/history.js").Mark} Mark */
/** @typedef {import("./timeline_layout.js").Plan} Plan */

/**
 * @typedef {object} Scene
 * @property {CanvasRenderingContext2D} context
 * @property {Plan} plan
 * @property {Theme} theme
 * @property {History} history
 * @property {number} budget
 * @property {number} numBlocks  that can be used
 * @property {string | null} lit
 */

const DIM = 0.3;
const MARK_REACH = 5;

/**
 * Everything that does not depend on a step: labels, lines, names of lanes.
 * @param {Scene} scene
 */
export function drawGround(scene) {
  const { context, plan, theme, history } = scene;
  const { colours } = theme;
  context.clearRect(0, 0, plan.width, plan.height);
  context.textAlign = "right";
  const x = plan.left - 8;
  const say = (/** @type {string} */ text, /** @type {number} */ y) =>
    label(context, theme, text, x, y, colours.soft, 11);
  const { budget, numBlocks } = scene;
  const { isNarrow } = plan;
  const words = gutterLabels({ budget, numBlocks, isNarrow, mostWaiting: history.mostWaiting });
  say(words[0], plan.axis + 6);
  say(words[1], plan.base + plan.down / 2 + 2);
  say(words[2], plan.pool + plan.poolHeight / 2);
  say(words[3], plan.waiting + plan.waitingHeight / 2);
  const right = xOf(plan, plan.columns);
  context.setLineDash([3, 3]);
  line(context, plan.left, plan.base - plan.up - 1, right, colours.soft);
  context.setLineDash([]);
  line(context, plan.left, plan.base, right, colours.line);
  context.fillStyle = colours.raised;
  context.fillRect(plan.left, plan.pool, right - plan.left, plan.poolHeight);
  plan.shown.forEach((lane, k) => {
    drawLaneName(scene, lane, plan.lanes + k * plan.laneHeight, right);
  });
  if (plan.hiddenLanes) {
    context.textAlign = "left";
    const y = plan.lanes + (plan.shown.length + 0.5) * plan.laneHeight;
    label(
      context,
      theme,
      `${count(plan.hiddenLanes)} more not shown at this step`,
      plan.left,
      y,
      colours.soft,
      10.5,
    );
  }
  context.textAlign = "left";
}

/**
 * The columns from `first` on.
 * @param {Scene} scene
 * @param {number} first
 */
export function drawColumns(scene, first) {
  const { plan, history } = scene;
  const filled = Math.ceil(history.length / plan.perColumn);
  for (let column = first; column < filled; column++) drawColumn(scene, column);
  plan.shown.forEach((lane, k) => {
    drawLane(scene, lane, plan.lanes + k * plan.laneHeight, first);
  });
}

/**
 * Everything from a column on, over what was there.
 * @param {Scene} scene
 * @param {number} column
 */
export function redrawFrom(scene, column) {
  const { context, plan } = scene;
  if (column === 0) {
    drawGround(scene);
    drawColumns(scene, 0);
    return;
  }
  // A bracket or a tick reaches a few pixels to the left of its column.
  const x = xOf(plan, column) - MARK_REACH;
  context.save();
  context.beginPath();
  context.rect(x, 0, plan.width - x, plan.height);
  context.clip();
  drawGround(scene);
  drawColumns(scene, Math.max(0, column - Math.ceil(MARK_REACH / plan.column)));
  context.restore();
}

/**
 * The numbers of steps, and that of the cursor in a box.
 * @param {Pick<Scene, "context" | "plan" | "theme" | "history">} scene
 * @param {{from: number, to: number, step: number} | null} cursor  from which to which x it stands
 */
export function drawAxis(scene, cursor) {
  const { context, plan, theme } = scene;
  const { colours } = theme;
  context.clearRect(0, 0, plan.width, plan.axis);
  if (!cursor) return drawNumbers(scene, null);
  const { from, to, step } = cursor;
  drawNumbers(scene, (from + to) / 2);
  context.font = font(theme, 11, 700);
  context.fillStyle = colours.ink;
  const text = count(step);
  const width = Math.max(to - from, context.measureText(text).width + 10);
  const middle = Math.max(width / 2, Math.min(plan.width - width / 2, (from + to) / 2));
  context.beginPath();
  context.roundRect(middle - width / 2, 1, width, plan.axis - 3, 3);
  context.fill();
  context.textAlign = "center";
  label(context, theme, text, middle, plan.axis / 2, colours.background, 11, 700);
}

/**
 * @param {Pick<Scene, "context" | "plan" | "theme" | "history">} scene
 * @param {number | null} cursor  x where the number of the cursor stands
 */
function drawNumbers({ context, plan, theme, history }, cursor) {
  const spacing = (34 * theme.textSize) / 12;
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
  const stepsIn = stepsPerColumn(history, plan);
  const every = steps.find((n) => (n / stepsIn) * plan.column >= spacing) ?? 10_000;
  context.textAlign = "center";
  let last = Number.NEGATIVE_INFINITY;
  for (let column = 0; column < plan.columns; column++) {
    const entry = history.entries[column * plan.perColumn];
    const end = history.entries[Math.min(history.length - 1, (column + 1) * plan.perColumn - 1)];
    // A step number that a column only spans is labelled there all the same.
    const step = entry ? Math.ceil(entry.from / every) * every : history.length ? -1 : column;
    const isHere = entry ? step >= 0 && step <= end.step : step % every === 0 && step >= 0;
    const x = (xOf(plan, column) + xOf(plan, column + 1)) / 2;
    if (!isHere || x - last < spacing * 0.8) continue;
    if (cursor !== null && Math.abs(x - cursor) < spacing * 0.85) continue;
    label(context, theme, count(step), x, plan.axis / 2, theme.colours.soft, 11);
    last = x;
  }
}

/**
 * @param {History} history
 * @param {Plan} plan
 */
function stepsPerColumn(history, plan) {
  if (history.length < 2) return plan.perColumn;
  const span = history.entries[history.length - 1].step - history.entries[0].from + 1;
  return Math.max(1, (span / history.length) * plan.perColumn);
}

/**
 * @param {Scene} scene
 * @param {number} column
 */
function drawColumn(scene, column) {
  const { context, plan, theme, history, numBlocks } = scene;
  const { colours } = theme;
  const first = column * plan.perColumn;
  const number = busiest(history, first, Math.min(history.length, first + plan.perColumn));
  const entries = history.entries.slice(first, first + plan.perColumn);
  const { stat } = history.entries[number];
  const x = xOf(plan, column);
  const next = xOf(plan, column + 1);
  const gap = plan.column > 8 ? 1 : 0;
  const bar = {
    x: x + gap,
    w: Math.max(1, next - x - 2 * gap - (gap ? 0 : plan.column > 3 ? 1 : 0)),
  };
  const litMark = scene.lit === null ? null : history.markAt(history.lanes.get(scene.lit), number);

  context.globalAlpha = scene.lit === null ? 1 : DIM;
  drawWork(scene, bar, stat);
  context.globalAlpha = 1;
  if (litMark) drawWork(scene, bar, workOf(litMark));

  const y = plan.pool + plan.poolHeight;
  const height = (/** @type {number} */ blocks) =>
    Math.round((plan.poolHeight * blocks) / Math.max(1, numBlocks));
  const used = height(stat.used);
  const kept = Math.min(plan.poolHeight - used, height(stat.kept));
  context.fillStyle = mix(colours.background, colours.work.decode, scene.lit === null ? 0.6 : 0.35);
  context.fillRect(x, y - used, next - x, used);
  context.fillStyle = mix(colours.background, colours.soft, 0.26);
  context.fillRect(x, y - used - kept, next - x, kept);
  if (litMark?.blocks) {
    const held = Math.max(1, height(litMark.blocks));
    context.fillStyle = colours.owner(
      history.lanes.get(scene.lit ?? "")?.slot ?? 254,
      scene.lit ?? undefined,
    ).hue;
    context.fillRect(x, y - held, next - x, held);
  }
  if (entries.some((entry) => entry.stat.evicted)) {
    context.fillStyle = colours.trouble;
    context.fillRect(Math.round((x + next) / 2) - 1, plan.pool - 3, Math.min(2, next - x), 5);
  }
  const waiting = Math.max(...entries.map((entry) => entry.stat.waiting));
  if (waiting) {
    const tall = Math.max(
      2,
      Math.round((plan.waitingHeight * waiting) / Math.max(4, history.mostWaiting)),
    );
    context.fillStyle = mix(colours.background, colours.soft, 0.5);
    context.fillRect(x, plan.waiting + plan.waitingHeight - tall, next - x, tall);
  }
  if (entries.some((entry) => entry.preempted.length)) {
    triangle(
      context,
      (x + next) / 2,
      plan.waiting - 3,
      Math.min(4.5, Math.max(2.5, plan.column / 2)),
      colours.trouble,
    );
  }
}

/**
 * A stack of decode, prefill and tokens computed again; below the line what the cache gave.
 * @param {Scene} scene
 * @param {{x: number, w: number}} bar
 * @param {{decode: number, prefill: number, recompute: number, cached: number}} work
 */
function drawWork({ context, plan, theme }, bar, work) {
  const { colours } = theme;
  let y = plan.base;
  const pile = (/** @type {number} */ tokens) => {
    const tall = tokens ? Math.max(1, Math.round(tokens * plan.scale)) : 0;
    y -= tall;
    return { ...bar, y, h: tall };
  };
  const decode = pile(work.decode);
  context.fillStyle = colours.work.decode;
  context.fillRect(decode.x, decode.y, decode.w, decode.h);
  const prefill = pile(work.prefill);
  context.fillStyle = colours.work.prefill;
  context.fillRect(prefill.x, prefill.y, prefill.w, prefill.h);
  const again = pile(work.recompute);
  if (again.h) {
    if (again.w >= 5 && again.h >= 3) {
      context.fillStyle = colours.background;
      context.fillRect(again.x, again.y, again.w, again.h);
      hatch(context, again, colours.work.recompute, 4);
      outline(context, again, colours.work.recompute, 1);
    } else {
      context.fillStyle = colours.work.recompute;
      context.fillRect(again.x, again.y, again.w, again.h);
    }
  }
  if (!work.cached) return;
  const tall = Math.max(3, Math.min(plan.down, Math.round(work.cached * plan.scale)));
  const box = { ...bar, y: plan.base + 1, h: tall };
  if (bar.w >= 4) outline(context, box, colours.work.cached, 1);
  else {
    context.fillStyle = colours.work.cached;
    context.fillRect(box.x, box.y + box.h - 1, box.w, 1);
    context.fillRect(box.x, box.y, 1, box.h);
  }
}

/** @param {Mark} mark */
function workOf(mark) {
  const { tokens, cached, work } = mark;
  return {
    ...{ decode: work === "decode" ? tokens : 0, prefill: work === "prefill" ? tokens : 0 },
    ...{ recompute: work === "recompute" ? tokens : 0, cached },
  };
}

/**
 * The entry with most tokens.
 * @param {History} history
 * @param {number} from
 * @param {number} to
 */
function busiest(history, from, to) {
  let best = from;
  for (let k = from; k < to; k++) {
    if (history.entries[k].stat.scheduled > history.entries[best].stat.scheduled) best = k;
  }
  return best;
}
