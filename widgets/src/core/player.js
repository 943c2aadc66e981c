// @ts-check
/**
 * A recorded run: any of its pictures, from the last one kept and the deltas after it.
 */
import { columnsFromLists } from "./columns.js";
import { History } from "./history.js";
import { Picture } from "./picture.js";

/** @typedef {import("./picture.js").Frame} Frame */

/** Frames from one picture that is kept to the next. */
const KEEP_EVERY = 64;

export class Player {
  /**
   * @param {Frame[]} frames  one or more per step, the first one full
   * @throws {Error} when a frame is missing or does not fit
   */
  constructor(frames) {
    if (!frames.length || frames[0].k !== "full")
      throw new Error("a page begins with a full frame");
    this.frames = frames;
    this.picture = new Picture();
    this.history = new History(frames.length);
    /** The picture after every 64th frame. @type {Picture[]} */
    this.kept = [];
    for (let k = 0; k < frames.length; k++) {
      this.#apply(k);
      this.history.record(this.picture);
      if (k % KEEP_EVERY === 0) this.kept.push(this.picture.clone());
    }
    this.place = frames.length - 1;
  }

  get length() {
    return this.frames.length;
  }

  /** The entry of the history that the picture belongs to. */
  get entry() {
    return this.history.entryOf(this.picture.step);
  }

  /**
   * The picture of frame `place`, held within the run.
   * @param {number} place
   * @returns {Picture}
   */
  seek(place) {
    const wanted = Math.max(0, Math.min(this.length - 1, Math.round(place)));
    if (wanted === this.place) return this.picture;
    let from = this.place + 1;
    if (wanted < this.place || wanted - this.place > KEEP_EVERY) {
      const kept = Math.floor(wanted / KEEP_EVERY);
      this.picture = this.kept[kept].clone();
      from = kept * KEEP_EVERY + 1;
    }
    for (let k = from; k <= wanted; k++) this.#apply(k);
    this.place = wanted;
    return this.picture;
  }

  /**
   * The place of the last frame that shows `step`, or the last one before it.
   * @param {number} step
   */
  placeOf(step) {
    let from = 0;
    let to = this.length;
    while (from < to) {
      const middle = (from + to) >> 1;
      if (this.frames[middle].step <= step) from = middle + 1;
      else to = middle;
    }
    return Math.max(0, from - 1);
  }

  /** @param {number} place */
  #apply(place) {
    const frame = this.frames[place];
    const result = this.picture.apply(frame, columnsFromLists(frame));
    if (result !== "applied")
      throw new Error(`frame ${place} of the page is missing or out of order`);
  }
}
