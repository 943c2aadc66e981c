// @ts-check
/**
 * Where the steps go: columns, bands and lanes of the timeline. Pure numbers.
 */

import { count } from "./core/format.js";

/** @typedef {import("./core/history.js").History} History */
/** @typedef {import("./core/history.js").Lane} Lane */

/**
 * @typedef {object} Plan
 * @property {number} width     px
 * @property {number} height    px
 * @property {number} left      px, where the first step begins
 * @property {number} column    px per column
 * @property {number} perColumn entries in a column
 * @property {number} columns   columns there is room for
 * @property {number} axis      px of the row of step numbers
 * @property {number} scale     px per token
 * @property {number} up        px from the base line to the budget
 * @property {number} base      y of the line that tokens stand on
 * @property {number} down      px below it for tokens from the cache
 * @property {number} pool      y of the pool band
 * @property {number} poolHeight
 * @property {number} waiting   y of the band of waiting requests
 * @property {number} waitingHeight
 * @property {number} lanes     y of the first lane
 * @property {number} laneHeight
 * @property {Lane[]} shown     lanes
 * @property {number} hiddenLanes
 * @property {boolean} isNarrow
 */

const WIDEST_COLUMN = 46;
const NARROWEST_COLUMN = 2;
const MOST_LANES = 16;
const EMPTY_COLUMNS = 40;
/** Least share of the height for the budget, however much came from the cache. */
const BUDGET_SHARE = 0.4;

/**
 * @param {{history: History, cursor: number, width: number, textSize: number, budget: number,
 *   isNarrow: boolean, isLive: boolean, gutter?: number}} given
 *   `gutter` is the width in px of the widest label at the left
 * @returns {Plan}
 */
export function planTimeline({
  history,
  cursor,
  width,
  textSize,
  budget,
  isNarrow,
  isLive,
  gutter = 0,
}) {
  const scale = textSize / 12;
  const left = Math.round(Math.max((isNarrow ? 70 : 92) * scale, gutter + 10));
  const room = Math.max(20, width - left - (isNarrow ? 4 : 8));
  const least = Math.max(1, Math.floor(room / WIDEST_COLUMN));
  const wanted = isLive ? capacity(history.length) : Math.max(least, history.length);
  const perColumn = Math.max(1, Math.ceil((wanted * NARROWEST_COLUMN) / room));
  const columns = Math.ceil(wanted / perColumn);
  const { shown, hiddenLanes } = pickLanes(history, cursor);
  const short = shown.length > 10 ? 14 : 15;
  const laneHeight = Math.round((isNarrow ? 12 : short) * scale);
  const tokens = isNarrow ? 62 : 78;
  const perToken = Math.max(
    tokens / (budget + history.mostCached * 1.02),
    (BUDGET_SHARE * tokens) / budget,
  );
  const axis = Math.round(18 * scale);
  const up = Math.round(budget * perToken);
  const base = axis + up + 3;
  const down = Math.max(10, Math.min(tokens - up, Math.ceil(history.mostCached * perToken)));
  const pool = base + down + 8;
  const poolHeight = isNarrow ? 22 : 28;
  const waiting = pool + poolHeight + 7;
  const waitingHeight = 14;
  const lanes = waiting + waitingHeight + 8;
  const rest = hiddenLanes ? laneHeight + 2 : 0;
  return {
    ...{ width, left, perColumn, columns, axis, scale: perToken, up, base, down, pool, poolHeight },
    column: Math.min(WIDEST_COLUMN, room / columns),
    height: lanes + shown.length * laneHeight + rest + 4,
    ...{ waiting, waitingHeight, lanes, laneHeight, shown, hiddenLanes, isNarrow },
  };
}

/**
 * @param {Plan} plan
 * @param {number} column
 */
export function xOf(plan, column) {
  return Math.round(plan.left + column * plan.column);
}

/**
 * From which to which x the cursor stands, at least 2 px.
 * @param {Plan} plan
 * @param {number} entry
 */
export function cursorBox(plan, entry) {
  const column = Math.floor(entry / plan.perColumn);
  const from = xOf(plan, column);
  return { from, to: Math.max(from + 2, xOf(plan, column + 1)) };
}

/**
 * The entry under x, held within those there are; null left of the first.
 * @param {Plan} plan
 * @param {number} x
 * @param {number} length entries there are
 * @returns {number | null}
 */
export function entryAt(plan, x, length) {
  if (x < plan.left - 6 || length === 0) return null;
  const column = Math.floor((x - plan.left) / plan.column);
  return Math.max(0, Math.min(length - 1, column * plan.perColumn));
}

/**
 * @param {Plan} plan
 * @param {number} y
 * @returns {Lane | null}
 */
export function laneAt(plan, y) {
  return plan.shown[Math.floor((y - plan.lanes) / plan.laneHeight)] ?? null;
}

/**
 * Room for more steps than there are, so that columns keep their place while steps arrive.
 * @param {number} length
 */
function capacity(length) {
  let room = EMPTY_COLUMNS;
  while (room < length) room = Math.ceil(room * 1.5);
  return room;
}

/**
 * All lanes when they are few, else those that live at the cursor.
 * @param {History} history
 * @param {number} cursor
 */
function pickLanes(history, cursor) {
  const all = [...history.lanes.values()];
  if (all.length <= MOST_LANES) return { shown: all, hiddenLanes: 0 };
  const { from, step } = history.entries[cursor] ?? { from: 0, step: 0 };
  const alive = all.filter(
    (lane) => lane.first <= step + 1 && (lane.last === null || lane.last >= from),
  );
  const shown = alive.slice(0, MOST_LANES);
  return { shown, hiddenLanes: all.length - shown.length };
}

/**
 * The words at the left: of the budget, the cache, the pool and the queue.
 * @param {{budget: number, numBlocks: number, mostWaiting: number, isNarrow: boolean}} given
 * @returns {[string, string, string, string]}
 */
export function gutterLabels({ budget, numBlocks, mostWaiting, isNarrow }) {
  return [
    `${isNarrow ? "" : "token "}budget ${count(budget)}`,
    "from cache",
    isNarrow ? `blocks ${count(numBlocks)}` : `blocks, of ${count(numBlocks)}`,
    isNarrow || !mostWaiting ? "waiting" : `waiting, most ${count(mostWaiting)}`,
  ];
}
