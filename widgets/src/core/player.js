// @ts-check
/**
 * A recorded run: any of its pictures, from full frames and the deltas after them.
 */
import { columnsFromLists } from "./columns.js";
import { History } from "./history.js";
import { Picture } from "./picture.js";

/** @typedef {import("./picture.js").Frame} Frame */

export class Player {
  /**
   * @param {Frame[]} frames  one per step, the first one full
   * @throws {Error} when a frame is missing or does not fit
   */
  constructor(frames) {
    if (!frames.length || frames[0].k !== "full")
      throw new Error("a page begins with a full frame");
    this.frames = frames;
    this.place = 0;
    this.picture = new Picture();
    this.history = new History(frames.length);
    for (let k = 0; k < frames.length; k++) {
      this.#apply(k);
      this.history.record(this.picture);
    }
    this.place = frames.length - 1;
  }

  get length() {
    return this.frames.length;
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
    if (wanted < this.place || wanted - this.place > 64) {
      // One frame before the wanted one, so that marks of what changed in it are right.
      from = Math.max(0, wanted - 1);
      while (from > 0 && this.frames[from].k !== "full") from--;
      this.picture = new Picture();
    }
    for (let k = from; k <= wanted; k++) this.#apply(k);
    this.place = wanted;
    return this.picture;
  }

  /**
   * The place of the frame that shows `step`, or the last one before it.
   * @param {number} step
   */
  placeOf(step) {
    let place = 0;
    while (place + 1 < this.length && this.frames[place + 1].step <= step) place++;
    return place;
  }

  /** @param {number} place */
  #apply(place) {
    const frame = this.frames[place];
    const result = this.picture.apply(frame, columnsFromLists(frame));
    if (result !== "applied")
      throw new Error(`frame ${place} of the page is missing or out of order`);
  }
}
