// @ts-check
/**
 * Where the blocks of a pool go in a box: cells in reading order, as large as fit. Pure numbers.
 */

/**
 * `text` has id, owner, text and foot; `name` id, owner and foot; `mark` colour only; in `bin`
 * a cell stands for several blocks.
 * @typedef {"text" | "name" | "mark" | "bin"} Level
 */

/**
 * @typedef {object} Layout
 * @property {Level} level
 * @property {number} first     id of the first block shown
 * @property {number} count     blocks shown
 * @property {number} perCell   blocks in a cell, 1 except in bins
 * @property {number} items     cells
 * @property {number} cols
 * @property {number} rows
 * @property {number} pitchX    px from cell to cell
 * @property {number} pitchY
 * @property {number} gap
 * @property {number} width     px
 * @property {number} height    px that are used
 */

/** @typedef {import("./core/draw.js").Box} Box */

/** Narrowest cell with text, narrowest with a name, smallest of its own; px at 12 px text. */
const TEXT_WIDTH = 54;
const NAME_WIDTH = 36;
const NAME_HEIGHT = 27;
const MARK_SIZE = 3;
const LARGEST_WIDTH = 132;
const IDEAL_ASPECT = 1.35;
const BIN = { w: 6, h: 10, gap: 1 };

/**
 * @param {{first?: number, count: number, width: number, height: number, textSize?: number,
 *   bin?: number}} box  `bin`: blocks that cannot be told apart, 1 where all can
 * @returns {Layout}
 */
export function layoutBlocks({ first = 0, count, width, height, textSize = 12, bin = 1 }) {
  const shown = { first, count: Math.max(1, count), width: Math.max(8, width) };
  const scale = textSize / 12;
  if (bin > 1) return bins(shown, height, bin);
  return (
    cellsWithNames(shown, height, scale) ?? cellsWithMarks(shown, height) ?? bins(shown, height, 1)
  );
}

/**
 * @param {{first: number, count: number, width: number}} shown
 * @param {number} height
 * @param {number} scale
 * @returns {Layout | null}
 */
function cellsWithNames(shown, height, scale) {
  const gap = 3;
  const { count, width } = shown;
  /** @type {Layout | null} */
  let best = null;
  let bestScore = Number.NEGATIVE_INFINITY;
  const most = Math.min(count, Math.floor((width + gap) / (NAME_WIDTH * scale + gap)));
  for (let cols = 1; cols <= most; cols++) {
    const rows = Math.ceil(count / cols);
    const w = Math.min((width + gap) / cols - gap, LARGEST_WIDTH * scale);
    const h = Math.min(w * 0.85, (height + gap) / rows - gap);
    if (h < NAME_HEIGHT * scale) continue;
    // Large cells that read, near the ideal aspect, with a full last row.
    const covered = (w * h * count) / (width * height);
    const odd = Math.abs(Math.log(w / h / IDEAL_ASPECT));
    const score = covered - 0.6 * odd - (0.3 * (rows * cols - count)) / count;
    if (score <= bestScore) continue;
    bestScore = score;
    best = {
      ...{ level: w >= TEXT_WIDTH * scale ? "text" : "name", ...shown, perCell: 1, items: count },
      ...{
        cols,
        rows,
        pitchX: w + gap,
        pitchY: h + gap,
        gap,
        height: Math.round(rows * (h + gap)),
      },
    };
  }
  return best;
}

/**
 * @param {{first: number, count: number, width: number}} shown
 * @param {number} height
 * @returns {Layout | null}
 */
function cellsWithMarks(shown, height) {
  const { count, width } = shown;
  for (let pitch = NAME_WIDTH; pitch > MARK_SIZE; pitch--) {
    const cols = Math.min(count, Math.floor(width / pitch));
    const rows = Math.ceil(count / Math.max(1, cols));
    if (cols < 1 || rows * pitch > height) continue;
    return {
      ...{ level: "mark", ...shown, perCell: 1, items: count, cols, rows },
      ...{ pitchX: pitch, pitchY: pitch, gap: pitch >= 14 ? 2 : 1, height: rows * pitch },
    };
  }
  return null;
}

/**
 * @param {{first: number, count: number, width: number}} shown
 * @param {number} height
 * @param {number} bin
 * @returns {Layout}
 */
function bins(shown, height, bin) {
  const cols = Math.max(1, Math.floor(shown.width / BIN.w));
  const room = cols * Math.max(1, Math.floor(height / BIN.h));
  const perCell = bin * Math.ceil(Math.ceil(shown.count / bin) / room);
  const items = Math.ceil(shown.count / perCell);
  const rows = Math.ceil(items / cols);
  return {
    ...{ level: "bin", ...shown, perCell, items, cols, rows },
    ...{ pitchX: BIN.w, pitchY: BIN.h, gap: BIN.gap, height: rows * BIN.h },
  };
}

/**
 * The box of cell `item`, on whole pixels.
 * @param {Layout} layout
 * @param {number} item
 * @returns {Box}
 */
export function boxOf(layout, item) {
  const { cols, pitchX, pitchY, gap } = layout;
  const x = Math.round((item % cols) * pitchX);
  const y = Math.round(Math.floor(item / cols) * pitchY);
  return {
    ...{ x, y, w: Math.round(((item % cols) + 1) * pitchX) - gap - x },
    h: Math.round((Math.floor(item / cols) + 1) * pitchY) - gap - y,
  };
}

/**
 * The cell at a point, or null outside of all.
 * @param {Layout} layout
 * @param {number} x
 * @param {number} y
 * @returns {number | null}
 */
export function itemAt(layout, x, y) {
  const col = Math.floor(x / layout.pitchX);
  const row = Math.floor(y / layout.pitchY);
  const item = row * layout.cols + col;
  const isInside = col >= 0 && col < layout.cols && row >= 0 && item >= 0 && item < layout.items;
  return isInside ? item : null;
}

/**
 * The cell that shows `block`, or null when it is out of the range shown.
 * @param {Layout} layout
 * @param {number} block
 * @returns {number | null}
 */
export function itemOf(layout, block) {
  const place = block - layout.first;
  return place >= 0 && place < layout.count ? Math.floor(place / layout.perCell) : null;
}

/**
 * First block of a cell, and the one after its last.
 * @param {Layout} layout
 * @param {number} item
 * @returns {[number, number]}
 */
export function blocksOf(layout, item) {
  const from = layout.first + item * layout.perCell;
  return [from, Math.min(layout.first + layout.count, from + layout.perCell)];
}

/**
 * The range of blocks after zooming by `factor` (below 1: closer) with the block under the
 * pointer held in place. Null when nothing would change.
 * @param {Layout} layout
 * @param {{x: number, y: number, factor: number, total: number, height: number, textSize?: number,
 *   bin?: number}} zoom  `bin` as in layoutBlocks
 * @returns {{first: number, count: number} | null}
 */
export function zoomBlocks(layout, { x, y, factor, total, height, textSize = 12, bin = 1 }) {
  const count = Math.max(Math.min(24, total), Math.min(total, Math.round(layout.count * factor)));
  const item = itemAt(layout, x, y);
  if (count === layout.count || item === null) return null;
  const [block] = blocksOf(layout, item);
  const next = layoutBlocks({ count, width: layout.width, height, textSize, bin });
  const nextItem = itemAt(next, x, Math.min(y, next.height - 1)) ?? next.items - 1;
  const first = Math.max(0, Math.min(total - count, block - nextItem * next.perCell));
  return { first: first - (first % bin), count };
}
