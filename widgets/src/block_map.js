// @ts-check
/**
 * The pool as a map: every block keeps its place, and only blocks that changed are drawn again.
 */
import { groundOf } from "./attention.js";
import { drawBin, drawBlock } from "./block_cells.js";
import { describeBin, describeBlock, namesOfSlots } from "./block_describe.js";
import { createHeldMarks } from "./block_held.js";
import { blocksOf, boxOf, itemAt, itemOf, layoutBlocks, zoomBlocks } from "./block_layout.js";
import { readout, summary } from "./block_words.js";
import { h, listen, setAttribute } from "./core/dom.js";
import { prepare } from "./core/draw.js";
import { IN_USE } from "./core/picture.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/link.js").Link} Link */
/** @typedef {import("./core/theme.js").Theme} Theme */
/** @typedef {import("./block_layout.js").Layout} Layout */
/**
 * @typedef {object} Look
 * @property {Theme} theme
 * @property {import("./core/picture.js").Changes} changes
 * @property {number} height
 * @property {import("./attention.js").ColourBy} [colour]  what the ground of a block says
 */

const MANY_DIRTY = 0.6;
/** Blocks of a pool in bins that Python tells singly at once. */
const MOST_WINDOW = 1024;
/** Blocks shown by a click on a bin: few enough for names. */
const CLOSE = 128;

/**
 * @param {HTMLElement} root  an empty element
 * @param {Link} link
 * @param {{context?: CanvasRenderingContext2D, redraw?: () => void, isLive?: boolean,
 *   askWindow?: (window: {first: number, count: number} | null) => void}} [options]
 *   `context` draws instead of the canvas's own; `redraw` asks for an update when the range or
 *   the cursor has moved; `isLive` lets news stay long enough to be seen; `askWindow`
 *   asks for single blocks of a pool in bins, and where it is missing bins are all there is
 */
export function createBlockMap(root, link, options = {}) {
  const { context: given, redraw = () => {}, isLive = false, askWindow } = options;
  const canvas = h("canvas", {
    class: "lms-map",
    role: "img",
    tabindex: 0,
    "aria-label": "blocks",
  });
  const line = h("div", { class: "lms-readout", "aria-live": "off" });
  root.append(canvas, line);
  /** @type {(() => void)[]} */
  const cleanups = [];
  /** @type {Picture | null} */
  let picture = null;
  /** @type {Layout | null} */
  let layout = null;
  /** @type {CanvasRenderingContext2D | null} */
  let context = null;
  /** @type {{first: number, count: number} | null} */
  let range = null;
  /** @type {number | null} */
  let cursor = null;
  /** @type {number | null} */
  let drawnCursor = null;
  let drawnKey = "";
  let height = 0;
  let textSize = 12;
  let isByAttention = false;
  const held = createHeldMarks(redraw);

  /**
   * Draws what has changed since the last call.
   * @param {Picture} next
   * @param {Look} look
   * @returns {number} cells drawn
   */
  function update(next, look) {
    picture = next;
    height = look.height;
    textSize = look.theme.textSize;
    isByAttention = look.colour === "attention";
    if (isLive) held.note(next, look.changes);
    const total = picture.numBlocks;
    if (range && range.first + range.count > total) range = null;
    if (cursor !== null && cursor >= total) cursor = null;
    const width = root.clientWidth || Number.parseInt(root.style.width, 10) || 0;
    if (!total || !width) return 0;
    const shown = range ?? { first: 0, count: total };
    const bin = isTold(picture, shown) ? 1 : picture.bins?.size;
    const { colours } = look.theme;
    const key = [
      ...[width, height, textSize, shown.first, shown.count, globalThis.devicePixelRatio],
      ...[colours.name, colours.background, look.theme.ui, link.lit, next.info?.block_size],
      ...[bin, isByAttention],
    ].join();
    let drawn;
    if (key !== drawnKey || !layout || look.changes.all) {
      const sized = { width, height, textSize, bin };
      layout = layoutBlocks({ ...shown, ...sized });
      context = given ?? prepare(canvas, width, layout.height);
      drawnKey = key;
      drawn = drawAll(picture, layout, look.theme);
    } else drawn = drawSome(picture, layout, look);
    drawnCursor = cursor;
    setAttribute(canvas, "aria-label", `step ${picture.step}: ${summary(picture)}`);
    readout(line, picture, pointed(layout), link, askWindow !== undefined);
    return drawn;
  }

  /**
   * @param {Picture} shown
   * @param {Layout} on
   * @param {Theme} theme
   */
  function drawAll(shown, on, theme) {
    if (!context) return 0;
    context.clearRect(0, 0, on.width, on.height);
    const slots = namesOfSlots(shown);
    for (let item = 0; item < on.items; item++) drawItem(shown, on, theme, item, slots);
    return on.items;
  }

  /**
   * @param {Picture} shown
   * @param {Layout} on
   * @param {Look} look
   */
  function drawSome(shown, on, look) {
    if (!context) return 0;
    /** @type {Set<number>} */
    const items = new Set();
    const blocks = [...look.changes.blocks, ...held.takeEnded()];
    if (isByAttention) blocks.push(...look.changes.mass);
    if (cursor !== drawnCursor) blocks.push(cursor ?? -1, drawnCursor ?? -1);
    for (const block of blocks) {
      const item = itemOf(on, block);
      if (item !== null) items.add(item);
    }
    if (items.size > on.items * MANY_DIRTY) return drawAll(shown, on, look.theme);
    const slots = namesOfSlots(shown);
    for (const item of items) {
      const box = boxOf(on, item);
      context.clearRect(box.x, box.y, box.w, box.h);
      drawItem(shown, on, look.theme, item, slots);
    }
    return items.size;
  }

  /**
   * @param {Picture} shown
   * @param {Layout} on
   * @param {Theme} theme
   * @param {number} item
   * @param {Map<number, string>} slots
   */
  function drawItem(shown, on, theme, item, slots) {
    if (!context) return;
    const box = boxOf(on, item);
    const [block, to] = blocksOf(on, item);
    const ground = isByAttention
      ? { attention: groundOf(theme.colours, shown.levelOf(block, to)) }
      : {};
    if (on.level === "bin") {
      const bin = describeBin(shown, on, theme, item, link.lit, cursor);
      drawBin(context, box, { ...bin, ...ground }, theme);
      return;
    }
    const described = held.add(describeBlock(shown, block, theme, link.lit, slots));
    const isCursor = block === cursor;
    drawBlock(context, box, { ...described, ...ground, isCursor }, theme, on.level);
  }

  /**
   * The blocks in the cell under the cursor.
   * @param {Layout} on
   */
  function pointed(on) {
    const item = cursor === null ? null : itemOf(on, cursor);
    if (item === null) return [];
    const [from, to] = blocksOf(on, item);
    return Array.from({ length: to - from }, (_, k) => from + k);
  }

  /** @param {number | null} block */
  function point(block) {
    if (block === cursor) return;
    cursor = block;
    const owners = picture && block !== null ? picture.ownersOf(block) : [];
    link.hover(
      owners.length === 1 && picture && (picture.state[block ?? 0] & 0xf) === IN_USE
        ? owners[0]
        : null,
    );
    redraw();
  }

  /** @param {PointerEvent | MouseEvent} event */
  function blockAt(event) {
    if (!layout) return null;
    const bounds = canvas.getBoundingClientRect();
    const item = itemAt(layout, event.clientX - bounds.left, event.clientY - bounds.top);
    return item === null ? null : blocksOf(layout, item)[0];
  }

  /**
   * Whether each of these blocks is known by itself.
   * @param {Picture} of
   * @param {{first: number, count: number}} blocks
   */
  function isTold({ bins, window }, { first, count }) {
    if (!bins) return true;
    return window !== null && first >= window.first && first + count <= window.first + window.count;
  }

  /** @param {{first: number, count: number} | null} wanted */
  function show(wanted) {
    if (!picture) return;
    range = wanted && wanted.count < picture.numBlocks ? wanted : null;
    if (picture.bins) askWindow?.(range && range.count <= MOST_WINDOW ? range : null);
    redraw();
  }

  listen(cleanups, canvas, "pointermove", (event) => point(blockAt(event)));
  listen(cleanups, canvas, "pointerleave", () => point(null));
  listen(cleanups, canvas, "click", (event) => {
    const block = blockAt(event);
    if (block !== null && comeCloser(block)) return;
    const owner = block === null ? undefined : picture?.ownersOf(block)[0];
    if (owner !== undefined) link.toggle(owner);
  });
  listen(cleanups, canvas, "dblclick", () => show(null));
  listen(
    cleanups,
    canvas,
    "wheel",
    (/** @type {WheelEvent} */ event) => {
      // The page scrolls unless the reader pinches or has chosen a map with small cells.
      const isMeant = event.ctrlKey || document.activeElement === canvas;
      const isSmall =
        layout && (range !== null || layout.level === "mark" || layout.level === "bin");
      if (!isMeant || !isSmall || !layout || !picture) return;
      if (picture.bins && !askWindow) return;
      event.preventDefault();
      const bounds = canvas.getBoundingClientRect();
      const zoomed = zoomBlocks(layout, {
        ...{ x: event.clientX - bounds.left, y: event.clientY - bounds.top },
        ...{ factor: event.deltaY > 0 ? 1.5 : 1 / 1.5, total: picture.numBlocks, height, textSize },
        bin: picture.bins && layout.count > MOST_WINDOW ? picture.bins.size : 1,
      });
      if (zoomed) show(zoomed);
    },
    { passive: false },
  );
  listen(cleanups, canvas, "keydown", (/** @type {KeyboardEvent} */ event) => {
    if (!layout || !picture || event.ctrlKey || event.altKey || event.metaKey) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -layout.cols, ArrowDown: layout.cols };
    const move = /** @type {Record<string, number>} */ (moves)[event.key];
    if (move !== undefined) {
      event.preventDefault();
      const block = (cursor ?? layout.first - layout.perCell) + move * layout.perCell;
      moveCursor(Math.max(0, Math.min(picture.numBlocks - 1, block)));
    } else if (event.key === "Enter" && cursor !== null) {
      event.preventDefault();
      if (comeCloser(cursor)) return;
      const owner = picture.ownersOf(cursor)[0];
      if (owner !== undefined) link.toggle(owner);
    } else if (event.key === "Escape" && range !== null) {
      event.stopPropagation();
      show(null);
    } else if (event.key === "Escape" && cursor !== null) point(null);
  });

  /**
   * From a bin to its blocks.
   * @param {number} block
   * @returns {boolean} whether there is anything to come closer to
   */
  function comeCloser(block) {
    if (!picture?.bins || !askWindow || layout?.level !== "bin") return false;
    const first = Math.max(0, Math.min(block, picture.numBlocks - CLOSE));
    show({ first, count: CLOSE });
    return true;
  }

  /** @param {number} block */
  function moveCursor(block) {
    if (range && picture && (block < range.first || block >= range.first + range.count)) {
      const first = Math.max(
        0,
        Math.min(picture.numBlocks - range.count, block - Math.floor(range.count / 2)),
      );
      show({ first, count: range.count });
    }
    point(block);
  }

  return {
    canvas,
    update,
    /** The layout drawn last. */
    get layout() {
      return layout;
    },
    get cursor() {
      return cursor;
    },
    destroy() {
      for (const cleanup of cleanups) cleanup();
      held.destroy();
      canvas.remove();
      line.remove();
    },
  };
}
