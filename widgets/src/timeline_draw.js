// @ts-check
/**
 * How the timeline looks: work against the budget, the pool, the queue, a lane per request.
 */

import { mix } from "./core/colour.js";
import { clipStart, font, hatch, label, outline, pattern, triangle } from "./core/draw.js";
import { count, visible } from "./core/format.js";
import { xOf } from "./timeline_layout.js";

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
  const short = plan.isNarrow;
  say(`${short ? "" : "token "}budget ${count(scene.budget)}`, plan.axis + 6);
  say("from cache", plan.base + plan.down / 2 + 2);
  say(
    short ? `blocks ${count(scene.numBlocks)}` : `blocks, of ${count(scene.numBlocks)}`,
    plan.pool + plan.poolHeight / 2,
  );
  say(
    short || !history.mostWaiting ? "waiting" : `waiting, most ${history.mostWaiting}`,
    plan.waiting + plan.waitingHeight / 2,
  );
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
 * What changes with every step: the numbers on the axis and the cursor, a frame round its step.
 * @param {Pick<Scene, "context" | "plan" | "theme" | "history">} scene
 * @param {{entry: number, step: number} | null} cursor
 */
export function drawOver(scene, cursor) {
  const { context, plan, theme } = scene;
  const { colours } = theme;
  const column = cursor ? Math.floor(cursor.entry / plan.perColumn) : 0;
  const from = xOf(plan, column);
  const to = Math.max(from + 2, xOf(plan, column + 1));
  drawAxis(scene, cursor ? (from + to) / 2 : null);
  if (!cursor) return;
  context.globalAlpha = 0.05;
  context.fillStyle = colours.ink;
  context.fillRect(from, plan.axis, to - from, plan.height - plan.axis);
  context.globalAlpha = 1;
  context.fillRect(from, plan.axis - 2, 1, plan.height - plan.axis + 2);
  context.fillRect(to - 1, plan.axis - 2, 1, plan.height - plan.axis + 2);
  context.font = font(theme, 11, 700);
  const text = count(cursor.step);
  const width = Math.max(to - from, context.measureText(text).width + 10);
  const middle = Math.max(width / 2, Math.min(plan.width - width / 2, (from + to) / 2));
  context.beginPath();
  context.roundRect(middle - width / 2, 1, width, plan.axis - 3, 3);
  context.fill();
  context.textAlign = "center";
  label(context, theme, text, middle, plan.axis / 2, colours.background, 11, 700);
  context.textAlign = "left";
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} from
 * @param {number} y
 * @param {number} to
 * @param {string} colour
 */
function line(context, from, y, to, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(from, y + 0.5);
  context.lineTo(to, y + 0.5);
  context.stroke();
}

/**
 * @param {Pick<Scene, "context" | "plan" | "theme" | "history">} scene
 * @param {number | null} cursor  x where the number of the cursor stands
 */
function drawAxis({ context, plan, theme, history }, cursor) {
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
  const litMark = scene.lit === null ? null : markAt(history.lanes.get(scene.lit), number);

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

/**
 * @param {Scene} scene
 * @param {Lane} lane
 * @param {number} y
 * @param {number} right
 */
function drawLaneName({ context, plan, theme, lit }, lane, y, right) {
  const { colours } = theme;
  const owner = colours.owner(lane.slot, lit === lane.id ? lane.id : undefined);
  line(context, plan.left, y + plan.laneHeight - 1, right, colours.lineSoft);
  context.globalAlpha = lit === null || lit === lane.id ? 1 : DIM;
  context.font = font(theme, 11, 600, true);
  context.textAlign = "right";
  context.fillStyle = colours.ink;
  const room = plan.left - 24;
  context.fillText(
    clipStart(context, visible(lane.id), room),
    plan.left - 20,
    y + plan.laneHeight / 2,
  );
  const swatch = { x: plan.left - 14, y: y + 2, w: 6, h: plan.laneHeight - 5 };
  context.fillStyle = owner.hue;
  context.fillRect(swatch.x, swatch.y, swatch.w, swatch.h);
  if (owner.edge !== owner.hue) outline(context, swatch, owner.edge, 1);
  pattern(context, swatch, owner, colours.ink);
  context.globalAlpha = 1;
}

/**
 * @param {Scene} scene
 * @param {Lane} lane
 * @param {number} y
 * @param {number} firstColumn
 */
function drawLane(scene, lane, y, firstColumn) {
  const { context, plan, theme, lit, history } = scene;
  const { colours } = theme;
  const owner = colours.owner(lane.slot, lit === lane.id ? lane.id : undefined);
  const lastEntry = lane.last ?? history.length - 1;
  const from = Math.max(firstColumn, Math.floor(lane.first / plan.perColumn));
  const to = Math.floor(lastEntry / plan.perColumn);
  const middle = Math.round(y + plan.laneHeight / 2) - 1;
  context.globalAlpha = lit === null || lit === lane.id ? 1 : DIM;
  for (let column = from; column <= to; column++) {
    const mark = strongest(
      lane,
      column * plan.perColumn,
      Math.min(lastEntry + 1, (column + 1) * plan.perColumn),
    );
    if (mark)
      drawMark(scene, mark, owner, { x: xOf(plan, column), end: xOf(plan, column + 1), y, middle });
  }
  const x = xOf(plan, Math.floor(lane.first / plan.perColumn));
  if (lane.sawArrival && Math.floor(lane.first / plan.perColumn) >= firstColumn) {
    context.fillStyle = colours.ink;
    context.fillRect(x, y + 1, 1.5, plan.laneHeight - 4);
  }
  if (lane.last !== null) {
    const end = xOf(plan, to + 1);
    context.fillStyle = colours.ink;
    if (lane.isFull) context.fillRect(end - 3, y + 1, 3, plan.laneHeight - 4);
    else {
      context.beginPath();
      context.arc(end - 2, middle, 3, 0, 2 * Math.PI);
      context.fill();
    }
  }
  context.globalAlpha = 1;
}

/**
 * @param {Scene} scene
 * @param {Mark} mark
 * @param {import("./core/palette.js").Owner} owner
 * @param {{x: number, end: number, y: number, middle: number}} at
 */
function drawMark({ context, plan, theme }, mark, owner, { x, end, y, middle }) {
  const { colours } = theme;
  const tall = {
    x,
    y: y + 1,
    w: Math.max(1, end - x - (plan.column > 4 ? 1 : 0)),
    h: plan.laneHeight - 4,
  };
  if (mark.work === "waiting") {
    context.fillStyle = colours.soft;
    for (let dot = x + ((4 - (x % 4)) % 4); dot < end; dot += 4)
      context.fillRect(dot, middle, 2, 1.5);
  } else if (mark.work === "decode") {
    context.fillStyle = owner.hue;
    context.fillRect(x, middle - 2, end - x, 4);
    if (owner.edge !== owner.hue) {
      context.fillStyle = owner.edge;
      context.fillRect(x, middle + 2, end - x, 1);
    }
  } else {
    context.fillStyle = owner.hue;
    context.fillRect(tall.x, tall.y, tall.w, tall.h);
    if (mark.work === "recompute") {
      if (tall.w >= 6) hatch(context, tall, owner.onHue, 4);
      outline(context, tall, colours.trouble, 1.2);
    } else if (plan.column >= (17 * theme.textSize) / 12 && mark.tokens) {
      context.font = font(theme, 10.5, 600);
      const text = String(mark.tokens);
      if (context.measureText(text).width <= tall.w - 2) {
        context.textAlign = "center";
        label(
          context,
          theme,
          text,
          tall.x + tall.w / 2,
          tall.y + tall.h / 2 + 0.5,
          owner.onHue,
          10.5,
          600,
        );
        context.textAlign = "left";
      }
    }
  }
  if (mark.cached) {
    context.fillStyle = colours.ink;
    context.fillRect(x - 4, y + 1, 1, plan.laneHeight - 4);
    context.fillRect(x - 4, y + 1, 3, 1);
    context.fillRect(x - 4, y + plan.laneHeight - 4, 3, 1);
  }
  if (mark.preempted)
    triangle(
      context,
      (x + end) / 2,
      y + 2,
      Math.min(5, plan.laneHeight / 2 - 1.5),
      colours.trouble,
    );
}

/**
 * @param {Lane | undefined} lane
 * @param {number} entry
 * @returns {Mark | null}
 */
function markAt(lane, entry) {
  return lane?.marks[entry - lane.first] ?? null;
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

/**
 * Of several marks the one that must not be lost; a preemption among them stays.
 * @param {Lane} lane
 * @param {number} from
 * @param {number} to
 * @returns {Mark | null}
 */
function strongest(lane, from, to) {
  const rank = { waiting: 0, decode: 1, prefill: 2, recompute: 3 };
  /** @type {Mark | null} */
  let best = null;
  let preempted = false;
  for (let k = Math.max(from, lane.first); k < to; k++) {
    const mark = markAt(lane, k);
    if (!mark) continue;
    preempted ||= mark.preempted;
    if (!best || rank[mark.work] > rank[best.work]) best = mark;
  }
  return best && { ...best, preempted };
}
