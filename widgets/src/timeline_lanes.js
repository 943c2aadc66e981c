// @ts-check
/**
 * A lane per request: waiting dotted, prefill tall, decode thin, computed again hatched.
 */
import { clipStart, font, hatch, label, line, outline, pattern, triangle } from "./core/draw.js";
import { visible } from "./core/format.js";
import { xOf } from "./timeline_layout.js";

/** @typedef {import("./core/history.js").Lane} Lane */
/** @typedef {import("./core/history.js").Mark} Mark */
/** @typedef {import("./timeline_draw.js").Scene} Scene */

const DIM = 0.3;

/**
 * @param {Scene} scene
 * @param {Lane} lane
 * @param {number} y
 * @param {number} right
 */
export function drawLaneName({ context, plan, theme, lit }, lane, y, right) {
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
export function drawLane(scene, lane, y, firstColumn) {
  const { context, plan, theme, lit, history } = scene;
  const { colours } = theme;
  const owner = colours.owner(lane.slot, lit === lane.id ? lane.id : undefined);
  const firstEntry = firstEntryOf(history, lane);
  const lastEntry = lane.last === null ? history.length - 1 : history.entryOf(lane.last);
  const from = Math.max(firstColumn, Math.floor(firstEntry / plan.perColumn));
  const to = Math.floor(lastEntry / plan.perColumn);
  const middle = Math.round(y + plan.laneHeight / 2) - 1;
  context.globalAlpha = lit === null || lit === lane.id ? 1 : DIM;
  for (let column = from; column <= to; column++) {
    const mark = strongest(
      history,
      lane,
      column * plan.perColumn,
      Math.min(lastEntry + 1, (column + 1) * plan.perColumn),
    );
    if (mark)
      drawMark(scene, mark, owner, { x: xOf(plan, column), end: xOf(plan, column + 1), y, middle });
  }
  const arrived = Math.floor(firstEntry / plan.perColumn);
  const x = xOf(plan, arrived);
  const sawArrival = lane.first >= (history.entries[0]?.from ?? 0);
  if (sawArrival && arrived >= firstColumn && arrived < plan.columns) {
    context.fillStyle = colours.ink;
    context.fillRect(x, y + 1, 1.5, plan.laneHeight - 4);
  }
  if (lane.last !== null && to >= firstColumn) {
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
 * The number of the entry in which a request could first be; the next to come when it has only
 * just arrived.
 * @param {import("./core/history.js").History} history
 * @param {Lane} lane
 */
export function firstEntryOf(history, lane) {
  const last = history.entries.at(-1);
  if (last && lane.first > last.step) return history.length;
  return Math.max(0, history.entryOf(lane.first));
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
 * Of several marks the one that must not be lost; a preemption among them stays.
 * @param {import("./core/history.js").History} history
 * @param {Lane} lane
 * @param {number} from
 * @param {number} to
 * @returns {Mark | null}
 */
function strongest(history, lane, from, to) {
  const rank = { waiting: 0, decode: 1, prefill: 2, recompute: 3 };
  /** @type {Mark | null} */
  let best = null;
  let preempted = false;
  for (let k = from; k < to; k++) {
    const mark = history.markAt(lane, k);
    if (!mark) continue;
    preempted ||= mark.preempted;
    if (!best || rank[mark.work] > rank[best.work]) best = mark;
  }
  return best && { ...best, preempted };
}
