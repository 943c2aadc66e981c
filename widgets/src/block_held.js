// @ts-check
/**
 * Hits and evictions of a live engine, which does many steps a second: they stay on the map long
 * enough to be seen.
 */
import { EVICTED, HIT } from "./core/picture.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {{until: number, isHit: boolean, isEvicted: boolean, was: string}} Held */

const HOLD_MS = 200;
/** More marks at once are a pattern and no news of one block; they last as long as their step. */
const MOST_HELD = 4096;

/**
 * @param {() => void} redraw  asks for an update when marks have ended
 * @param {() => number} [clock]  milliseconds
 */
export function createHeldMarks(redraw, clock = () => performance.now()) {
  /** @type {Map<number, Held>} */
  const held = new Map();
  /** @type {Picture | null} */
  let picture = null;
  let step = -1;
  /** @type {ReturnType<typeof setTimeout> | null} */
  let timer = null;

  function wait() {
    if (timer !== null || !held.size) return;
    const first = Math.min(...[...held.values()].map((mark) => mark.until));
    timer = setTimeout(
      () => {
        timer = null;
        redraw();
        wait();
      },
      Math.max(1, first - clock()),
    );
  }

  return {
    /**
     * Keeps the news of a picture. Another picture, or one of an earlier step, has its own.
     * @param {Picture} next
     * @param {import("./core/picture.js").Changes} changes
     */
    note(next, changes) {
      if (next !== picture || next.step < step) held.clear();
      picture = next;
      step = next.step;
      if (next.bins) return;
      for (const block of changes.blocks) {
        const bits = next.state[block];
        if (!(bits & (HIT | EVICTED)) || held.size >= MOST_HELD) continue;
        const before = held.get(block);
        held.set(block, {
          until: clock() + HOLD_MS,
          isHit: Boolean(bits & HIT) || (before?.isHit ?? false),
          isEvicted: Boolean(bits & EVICTED) || (before?.isEvicted ?? false),
          was: next.cells.get(block)?.[4] ?? before?.was ?? "",
        });
      }
      wait();
    },
    /**
     * A block with the marks that it still has.
     * @param {import("./block_cells.js").Block} block
     */
    add(block) {
      const mark = held.get(block.id);
      if (!mark) return block;
      return {
        ...block,
        isHit: block.isHit || mark.isHit,
        isEvicted: block.isEvicted || mark.isEvicted,
        was: block.was || mark.was,
      };
    },
    /** The blocks whose marks have ended, once. */
    takeEnded() {
      const now = clock();
      const ended = [...held].filter(([, mark]) => mark.until <= now).map(([block]) => block);
      for (const block of ended) held.delete(block);
      return ended;
    },
    destroy() {
      if (timer !== null) clearTimeout(timer);
      timer = null;
      held.clear();
    },
  };
}
