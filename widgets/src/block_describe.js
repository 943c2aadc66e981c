// @ts-check
/**
 * From a picture to what the map draws: whose a block is, how it stands out, whether it is lit.
 */
import { blocksOf } from "./block_layout.js";
import { EVICTED, HIT, IN_USE, KEPT, WRITTEN } from "./core/picture.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/theme.js").Theme} Theme */
/** @typedef {import("./block_layout.js").Layout} Layout */

/**
 * What the map draws for one block.
 * @param {Picture} picture
 * @param {number} block
 * @param {Theme} theme
 * @param {string | null} lit
 * @param {Map<number, string>} slots
 * @returns {import("./block_cells.js").Block}
 */
export function describeBlock(picture, block, theme, lit, slots) {
  const bits = picture.state[block];
  const state = bits & 0xf;
  const cell = picture.cells.get(block);
  const names = picture.ownersOf(block);
  const slot = picture.slot[block];
  const { colours } = theme;
  const ownerOf = (/** @type {string} */ id, /** @type {number} */ fallback) =>
    colours.owner(picture.rows.get(id)?.slot ?? fallback, id === lit ? id : undefined);
  const isOwned = state === IN_USE || state === KEPT;
  const owners = !isOwned
    ? []
    : state === IN_USE && names.length
      ? names.map((id, k) => ownerOf(id, k === 0 ? slot : 254))
      : [colours.owner(slot, names[0] !== undefined && names[0] === lit ? lit : undefined)];
  const name = names[0] ?? (isOwned ? slots.get(slot) : undefined) ?? "";
  const place = picture.next.indexOf(block);
  return {
    ...{ id: block, state, owners, name, ref: picture.ref[block], fill: picture.fill[block] },
    size: picture.info?.block_size ?? 1,
    writtenFrom: bits & WRITTEN ? picture.writtenFrom[block] : null,
    text: isOwned ? (cell?.[2] ?? "") : "",
    ...{ isHit: (bits & HIT) !== 0, isEvicted: (bits & EVICTED) !== 0, was: cell?.[4] ?? "" },
    queue: place >= 0 && place < 3 ? place + 1 : 0,
    isDim:
      lit !== null &&
      block !== 0 &&
      !names.includes(lit) &&
      cell?.[4] !== lit &&
      !(cell === undefined && name === lit),
    isCursor: false,
  };
}

/**
 * @param {Picture} picture
 * @param {Layout} layout
 * @param {Theme} theme
 * @param {number} item
 * @param {string | null} lit
 * @param {number | null} cursor
 */
export function describeBin(picture, layout, theme, item, lit, cursor) {
  const [from, to] = blocksOf(layout, item);
  const litSlot = lit === null ? -1 : (picture.rows.get(lit)?.slot ?? -1);
  const {
    most,
    lit: isLit,
    ...bin
  } = picture.bins && layout.perCell > 1
    ? countBins(picture.bins, from, to, litSlot)
    : countBlocks(picture, from, to, litSlot);
  return {
    ...bin,
    owner: most === null ? null : theme.colours.owner(most),
    isDim: lit !== null && !isLit,
    isCursor: cursor !== null && cursor >= from && cursor < to,
  };
}

/**
 * The states of the blocks from `from` to before `to`, and whose most of them are.
 * @param {Picture} picture
 * @param {number} from
 * @param {number} to
 * @param {number} [litSlot]
 */
export function countBlocks(picture, from, to, litSlot = -1) {
  const bySlot = new Map();
  const bin = { total: to - from, used: 0, kept: 0, hits: 0, evicted: 0, lit: false };
  for (let block = from; block < to; block++) {
    const bits = picture.state[block];
    const state = bits & 0xf;
    if (state === IN_USE) bin.used++;
    if (state === KEPT) bin.kept++;
    if (bits & HIT) bin.hits++;
    if (bits & EVICTED) bin.evicted++;
    if (state !== IN_USE && state !== KEPT) continue;
    const slot = picture.slot[block];
    bin.lit ||= slot === litSlot;
    bySlot.set(slot, (bySlot.get(slot) ?? 0) + 1);
  }
  /** @type {number | null} */
  let most = null;
  for (const [slot, count] of bySlot) if (most === null || count > bySlot.get(most)) most = slot;
  return { ...bin, most };
}

/**
 * The same where Python has counted: hits and evictions are bins that have some.
 * @param {import("./core/picture.js").Bins} bins
 * @param {number} from
 * @param {number} to
 * @param {number} [litSlot]
 */
export function countBins(bins, from, to, litSlot = -1) {
  const made = { total: to - from, used: 0, kept: 0, hits: 0, evicted: 0, lit: false };
  /** @type {number | null} */
  let most = null;
  let largest = 0;
  for (let bin = Math.floor(from / bins.size); bin * bins.size < to; bin++) {
    const filled = bins.used[bin] + bins.kept[bin];
    made.used += bins.used[bin];
    made.kept += bins.kept[bin];
    if (bins.flags[bin] & HIT) made.hits++;
    if (bins.flags[bin] & EVICTED) made.evicted++;
    if (!filled) continue;
    made.lit ||= bins.slot[bin] === litSlot;
    if (filled > largest) [most, largest] = [bins.slot[bin], filled];
  }
  return { ...made, most };
}

/**
 * Which request has a slot now, for pools too large for words.
 * @param {Picture} picture
 * @returns {Map<number, string>}
 */
export function namesOfSlots(picture) {
  const names = new Map();
  for (const row of picture.rows.values()) {
    if (row.slot < 254 && !(row.state === "finished" && names.has(row.slot)))
      names.set(row.slot, row.id);
  }
  return names;
}
