// @ts-check
/**
 * Looking back while an engine runs: the page shows an earlier step, and the engine goes on.
 */
import { count } from "./core/format.js";

/** @typedef {import("./core/stream.js").Stream} Stream */
/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/keys.js").Action} Action */

/**
 * @param {Stream} stream
 * @param {{redraw: () => void, seek?: (step: number) => boolean}} options
 *   `seek` asks Python to go there; it answers whether it can
 */
export function createLookingBack(stream, { redraw, seek = () => false }) {
  /** The step looked at, null: the last one. @type {number | null} */
  let step = null;

  /** @param {number} entry */
  function goTo(entry) {
    const { entries } = stream.history;
    const found = entries[Math.max(0, Math.min(entries.length - 1, entry))];
    if (!found) return false;
    if (seek(found.step)) return true;
    const isLast = entry >= entries.length - 1;
    const wanted = isLast ? null : found.step;
    if (wanted === step) return false;
    step = wanted;
    redraw();
    return true;
  }

  /** The number of the entry that is shown. */
  function cursor() {
    const { history, picture } = stream;
    return history.entryOf(step ?? picture.step);
  }

  return {
    isBack: () => step !== null,
    goTo,
    cursor,
    /** Back to the last step. */
    end() {
      if (step === null) return false;
      step = null;
      redraw();
      return true;
    },
    /**
     * @param {Action} action
     * @returns {boolean}
     */
    perform(action) {
      const { history } = stream;
      const at = cursor();
      if (action === "back") return goTo(at - 1);
      if (action === "forward") return goTo(at + 1);
      if (action === "first") return goTo(0);
      if (action === "last") return goTo(history.length - 1);
      const found = history.nextEvent(at, action === "event" ? 1 : -1);
      return found !== null && goTo(found);
    },
    /**
     * What to draw: an earlier step as far as it is known, else the last one.
     * @returns {{picture: Picture, cursor: number, back: string}}
     */
    shown() {
      const { history, picture, reel } = stream;
      if (step === null) return { picture, cursor: cursor(), back: "" };
      const entry = history.entries[cursor()];
      const found = entry && reel.pictureOf(entry.step);
      if (!entry || !found) {
        // What was looked at has been dropped.
        step = null;
        return { picture, cursor: cursor(), back: "" };
      }
      const back = `Looking back, step ${count(entry.step)} of ${count(picture.step)}`;
      if (found.step >= entry.from) return { picture: found, cursor: cursor(), back };
      const between = found.clone();
      const { stat, preempted } = entry;
      Object.assign(between, { step: entry.step, stat, preempted, struct: null, at: -1 });
      between.boundary = "";
      between.where = "";
      between.note = `Of step ${count(entry.step)} only the counts were sent; blocks, texts and requests are those of step ${count(found.step)}.`;
      return { picture: between, cursor: cursor(), back };
    },
  };
}
