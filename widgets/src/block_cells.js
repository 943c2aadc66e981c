// @ts-check
/**
 * How one block looks, on any 2D context: fill is the owner, outline and pattern the state.
 */
import {
  clip,
  clipStart,
  corner,
  dashed,
  font,
  hairline,
  label,
  outline,
  pattern,
  wrap,
} from "./core/draw.js";
import { visible } from "./core/format.js";
import { EMPTY, IN_USE, KEPT, NULL } from "./core/picture.js";

/** @typedef {import("./core/theme.js").Theme} Theme */
/** @typedef {import("./core/palette.js").Owner} Owner */
/** @typedef {import("./core/draw.js").Box} Box */
/** @typedef {import("./block_layout.js").Level} Level */

/**
 * @typedef {object} Block
 * @property {number} id
 * @property {number} state       EMPTY, IN_USE, KEPT or NULL
 * @property {Owner[]} owners     of the holders, or of the one that stored what is kept
 * @property {string} name        of the holder, or of the storer
 * @property {number} ref
 * @property {number} fill        tokens
 * @property {number} size        tokens it can hold
 * @property {number | null} writtenFrom  first token written in this step
 * @property {string} text
 * @property {boolean} isHit
 * @property {boolean} isEvicted
 * @property {string} was         whose content was evicted, or ""
 * @property {number} queue       1, 2, 3 when it is handed out next, else 0
 * @property {boolean} isDim
 * @property {boolean} isCursor
 * @property {import("./core/palette.js").Ground | null} [attention]  the ground instead of the
 *   owner's; null: it gets next to no attention
 */

const MOST_BANDS = 6;
const DIM = 0.34;

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {Block} block
 * @param {Theme} theme
 * @param {Level} level
 */
export function drawBlock(context, box, block, theme, level) {
  context.globalAlpha = block.isDim ? DIM : 1;
  if (level === "mark") drawMark(context, box, block, theme);
  else drawCell(context, box, block, theme, level);
  context.globalAlpha = 1;
  if (block.isCursor) outline(context, box, theme.colours.focus, level === "mark" ? 2 : 2.5);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {Block} block
 * @param {Theme} theme
 * @param {Level} level
 */
function drawCell(context, box, block, theme, level) {
  const { colours } = theme;
  const foot = Math.max(3, Math.min(5, Math.round(box.w / 12)));
  if (block.attention) fill(context, box, block.attention.ground);
  if (block.state === NULL) drawNull(context, box, theme);
  else if (block.state === IN_USE) drawInUse(context, box, block, theme, foot);
  else if (block.state === KEPT) {
    const edge = block.attention === undefined ? block.owners[0]?.edge : undefined;
    dashed(context, box, edge ?? colours.line);
  } else hairline(context, box, colours.lineSoft);
  if (block.state !== NULL) drawWords(context, box, block, theme, level, foot);
  else if (box.w >= 46)
    label(
      context,
      theme,
      "0 null",
      box.x + 6,
      box.y + 9 * (theme.textSize / 12),
      colours.soft,
      10.5,
    );
  if (block.isEvicted) corner(context, box, colours.trouble, Math.min(13, box.w * 0.22));
  if (block.isHit) drawHit(context, box, block, theme, 2);
  drawTags(context, box, block, theme, level, foot);
}

/**
 * A cell of a few pixels: solid in use, pale kept, a dot empty.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {Block} block
 * @param {Theme} theme
 */
function drawMark(context, box, block, theme) {
  const { colours } = theme;
  const { x, y, w, h } = box;
  const owner = block.owners[0];
  if (block.attention !== undefined && (block.attention || block.owners.length)) {
    fill(context, box, block.attention?.ground ?? colours.lineSoft);
    if (block.ref > 1)
      fill(
        context,
        { ...box, h: Math.max(1, Math.round(h / 5)) },
        block.attention?.text ?? colours.ink,
      );
  } else if (block.state === IN_USE) {
    context.fillStyle = w >= 12 ? (owner?.hue ?? colours.soft) : (owner?.small ?? colours.soft);
    context.fillRect(x, y, w, h);
    if (w >= 12 && owner) pattern(context, { ...box }, owner, colours.ink);
    if (block.ref > 1) {
      context.fillStyle = colours.ink;
      context.fillRect(x, y, w, Math.max(1, Math.round(h / 5)));
    }
  } else if (block.state === KEPT) {
    context.fillStyle = owner?.tint ?? colours.lineSoft;
    context.fillRect(x, y, w, h);
    if (w >= 8) hairline(context, box, owner?.edge ?? colours.line);
  } else if (block.state === EMPTY) {
    const dot = w >= 8 ? 2 : 1;
    context.fillStyle = colours.line;
    context.fillRect(x + Math.floor((w - dot) / 2), y + Math.floor((h - dot) / 2), dot, dot);
  } else drawNull(context, box, theme);
  if (block.isEvicted) corner(context, box, colours.trouble, Math.max(3, w * 0.5));
  if (block.isHit) drawHit(context, box, block, theme, w >= 8 ? 2 : 1);
}

/**
 * An outline in ink, and on a ground that may be as dark one inside that reads on it.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {Block} block
 * @param {Theme} theme
 * @param {number} width px
 */
function drawHit(context, box, block, theme, width) {
  outline(context, box, theme.colours.ink, width);
  if (!block.attention || box.w < 4 * width) return;
  const { x, y, w, h } = box;
  const inside = { x: x + width, y: y + width, w: w - 2 * width, h: h - 2 * width };
  outline(context, inside, block.attention.text, 1);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {string} colour
 */
function fill(context, { x, y, w, h }, colour) {
  context.fillStyle = colour;
  context.fillRect(x, y, w, h);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {Theme} theme
 */
function drawNull(context, box, theme) {
  const { x, y, w, h } = box;
  context.strokeStyle = theme.colours.lineSoft;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x + 1, y + 1);
  context.lineTo(x + w - 1, y + h - 1);
  context.moveTo(x + w - 1, y + 1);
  context.lineTo(x + 1, y + h - 1);
  context.stroke();
  hairline(context, box, theme.colours.line);
}

/**
 * Bands of tint, one per owner, on a foot of full hue that shows the slots.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {Block} block
 * @param {Theme} theme
 * @param {number} foot px
 */
function drawInUse(context, box, block, theme, foot) {
  const { colours } = theme;
  const { x, y, w, h } = box;
  const owners = block.owners.slice(0, MOST_BANDS);
  owners.forEach((owner, k) => {
    const from = x + Math.round((w * k) / owners.length);
    const to = x + Math.round((w * (k + 1)) / owners.length);
    const isByOwner = block.attention === undefined;
    if (isByOwner) {
      context.fillStyle = owner.tint;
      context.fillRect(from, y, to - from, h);
    }
    context.fillStyle = owner.hue;
    context.fillRect(from, y + h - foot, to - from, foot);
    pattern(context, { x: from, y: y + h - foot, w: to - from, h: foot }, owner, colours.ink);
    if (k > 0) {
      context.fillStyle = colours.background;
      context.fillRect(from, isByOwner ? y : y + h - foot, 1, isByOwner ? h : foot);
    }
  });
  if (block.attention === null) hairline(context, box, colours.line);
  const slot = w / Math.max(1, block.size);
  const place = (/** @type {number} */ token) => x + Math.round(token * slot);
  if (block.fill < block.size) {
    context.fillStyle = colours.background;
    context.fillRect(place(block.fill), y + h - foot, x + w - place(block.fill), foot);
  }
  if (block.writtenFrom === null || block.writtenFrom >= block.fill) return;
  context.fillStyle = colours.ink;
  if (slot < 6) {
    context.fillRect(
      place(block.writtenFrom),
      y + h - foot,
      place(block.fill) - place(block.writtenFrom),
      foot,
    );
    return;
  }
  for (let token = block.writtenFrom; token < block.fill; token++) {
    context.fillRect(place(token) + 1, y + h - foot, place(token + 1) - place(token) - 2, foot);
  }
}

/**
 * Id, owner and text of a cell.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {Block} block
 * @param {Theme} theme
 * @param {Level} level
 * @param {number} foot px
 */
function drawWords(context, box, block, theme, level, foot) {
  const { colours, textSize } = theme;
  const scale = textSize / 12;
  const ink = block.attention?.text ?? (block.state === IN_USE ? colours.ink : colours.soft);
  const top = box.y + 9 * scale;
  const id = String(block.id);
  const left = box.x + (level === "text" ? 6 : 5) + (block.isEvicted ? Math.min(6, box.w / 10) : 0);
  label(context, theme, id, left, top, ink, 10.5);
  const room = box.x + box.w - 4 - left - context.measureText(id).width - 1;
  context.textAlign = "right";
  if (block.state === IN_USE && block.ref > 1) {
    context.font = font(theme, 11, 700);
    context.fillStyle = ink;
    context.fillText(`×${block.ref}`, box.x + box.w - 4, top);
  } else if (block.name) {
    context.font = font(theme, 10.5, block.state === IN_USE ? 600 : 400, true);
    context.fillStyle = ink;
    context.fillText(clipStart(context, visible(block.name), room), box.x + box.w - 4, top);
  }
  context.textAlign = "left";
  if (level !== "text" || !block.text) return;
  context.font = font(theme, 11);
  context.fillStyle = ink;
  const line = 13 * scale;
  const taken = foot + (block.isEvicted && block.was ? 13 * scale : 0);
  const lines = Math.floor((box.h - 15 * scale - taken) / line);
  const most = Math.max(lines, box.h >= 34 * scale ? 1 : 0);
  // The number in the queue has the corner: in a low cell beside the only line, else below it.
  const free = block.queue && most > 1 ? most - 1 : most;
  const width = box.w - 11 - (block.queue && most === 1 ? 19 * scale : 0);
  for (const [k, words] of wrap(context, visible(block.text).trim(), width, free).entries()) {
    context.fillText(words, box.x + 6, box.y + 22 * scale + k * line);
  }
}

/**
 * What is news in this step and what comes next: `was r2`, the number in the queue.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {Block} block
 * @param {Theme} theme
 * @param {Level} level
 * @param {number} foot px
 */
function drawTags(context, box, block, theme, level, foot) {
  const { colours, textSize } = theme;
  const scale = textSize / 12;
  const radius = 7.5 * scale;
  // The number in the queue stands in the corner, and the tag beside it.
  const right = box.x + box.w - (block.queue ? 2 * radius + 6 : 1);
  if (block.isEvicted && block.was && level === "text" && box.h >= 44 * scale) {
    context.font = font(theme, 10.5, 600);
    const words = clip(context, `was ${visible(block.was)}`, right - box.x - 12);
    const width = Math.ceil(context.measureText(words).width) + 8;
    const height = Math.round(13 * scale);
    const x = right - width;
    const y = box.y + box.h - foot - height - 1;
    context.fillStyle = colours.troubleTint;
    context.fillRect(x, y, width, height);
    context.fillStyle = colours.troubleText;
    context.fillText(words, x + 4, y + height / 2 + 0.5);
  }
  if (block.queue) {
    drawQueueNumber(context, box.x + box.w - radius - 4, box.y + box.h - radius - 4, block, theme);
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 * @param {{queue: number, state: number}} block
 * @param {Theme} theme
 */
export function drawQueueNumber(context, x, y, block, theme) {
  const { colours } = theme;
  const loses = block.state === KEPT;
  context.beginPath();
  context.arc(x, y, 7.5 * (theme.textSize / 12), 0, 2 * Math.PI);
  context.fillStyle = colours.background;
  context.fill();
  context.strokeStyle = loses ? colours.trouble : colours.soft;
  context.lineWidth = 1.4;
  context.stroke();
  context.textAlign = "center";
  label(
    context,
    theme,
    String(block.queue),
    x,
    y + 0.5,
    loses ? colours.troubleText : colours.soft,
    10.5,
    700,
  );
  context.textAlign = "left";
}

/**
 * Many blocks in one cell: the share of their states as a stack in the hue of most of them.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {{total: number, used: number, kept: number, hits: number, evicted: number, owner: Owner | null, isDim: boolean, isCursor: boolean, attention?: Block["attention"]}} bin
 * @param {Theme} theme
 */
export function drawBin(context, box, bin, theme) {
  const { colours } = theme;
  const { x, y, w, h } = box;
  context.globalAlpha = bin.isDim ? DIM : 1;
  context.fillStyle = colours.lineSoft;
  context.fillRect(x, y, w, h);
  if (bin.attention !== undefined) drawAttendedBin(context, box, bin, theme);
  else drawStates(context, box, bin, theme);
  if (bin.evicted) corner(context, box, colours.trouble, 4);
  if (bin.hits) outline(context, box, colours.ink, 1);
  context.globalAlpha = 1;
  if (bin.isCursor) outline(context, box, colours.focus, 2);
}

/**
 * The ground of its most attended block; where there is none, how far it is filled as a line.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {{total: number, used: number, kept: number, attention?: Block["attention"]}} bin
 * @param {Theme} theme
 */
function drawAttendedBin(context, box, { total, used, kept, attention }, { colours }) {
  if (attention) fill(context, box, attention.ground);
  else if (used + kept) {
    const height = Math.max(1, Math.round((box.h * (used + kept)) / total));
    fill(context, { ...box, y: box.y + box.h - height, w: 1, h: height }, colours.line);
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {{total: number, used: number, kept: number, owner: Owner | null}} bin
 * @param {Theme} theme
 */
function drawStates(context, box, bin, { colours }) {
  const { x, y, w, h } = box;
  const used = bin.used ? Math.max(1, Math.round((h * bin.used) / bin.total)) : 0;
  const kept = Math.min(
    h - used,
    bin.kept ? Math.max(1, Math.round((h * bin.kept) / bin.total)) : 0,
  );
  context.fillStyle = bin.owner?.small ?? colours.soft;
  context.fillRect(x, y + h - used, w, used);
  context.fillStyle = bin.owner?.tint ?? colours.line;
  context.fillRect(x, y + h - used - kept, w, kept);
}
