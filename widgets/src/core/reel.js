// @ts-check
/**
 * The pictures of a live stream that have been, within bounds: what looking back shows.
 */

/** @typedef {import("./picture.js").Frame} Frame */
/** @typedef {import("./picture.js").Picture} Picture */
/** @typedef {import("./columns.js").Columns} Columns */

/**
 * A picture and the deltas after it.
 * @typedef {object} Stretch
 * @property {Picture} start
 * @property {{frame: Frame, columns: Columns}[]} deltas
 * @property {number} bytes  about so many
 */

/** Deltas from one picture that is kept to the next. */
const MOST_DELTAS = 64;
const MOST_BYTES = 48 << 20;
const ROW_BYTES = 600;
const CELL_BYTES = 160;
const FRAME_BYTES = 1500;

export class Reel {
  /** @param {number} [mostBytes] */
  constructor(mostBytes = MOST_BYTES) {
    this.mostBytes = mostBytes;
    /** Oldest first. @type {Stretch[]} */
    this.stretches = [];
    this.bytes = 0;
    /** The picture shown last, and how many deltas are in it. */
    this.shown = /** @type {{stretch: Stretch, count: number, picture: Picture} | null} */ (null);
  }

  /** The first step that can be looked at; null when there is none. */
  get firstStep() {
    return this.stretches[0]?.start.step ?? null;
  }

  /**
   * Keeps a frame that `picture` has just applied. A run that begins anew ends what there was.
   * @param {Frame} frame
   * @param {Columns} columns
   * @param {Picture} picture
   */
  push(frame, columns, picture) {
    const last = this.stretches.at(-1);
    const before = last && (last.deltas.at(-1)?.frame.step ?? last.start.step);
    if (before !== undefined && picture.step < before) this.clear();
    const open = this.stretches.at(-1);
    let bytes;
    if (frame.k === "delta" && open && open.deltas.length < MOST_DELTAS) {
      bytes = FRAME_BYTES + frame.rows.length * 100 + (frame.cells?.length ?? 0) * CELL_BYTES;
      bytes += (columns.state.length + columns.used.length) * 10;
      open.deltas.push({ frame, columns });
      open.bytes += bytes;
    } else {
      const start = picture.clone();
      // What is told once a frame is known to the history, or is shown by the last frame only.
      start.log = [];
      bytes = FRAME_BYTES + start.state.length * 5 + (picture.bins?.used.length ?? 0) * 6;
      bytes += picture.rows.size * ROW_BYTES + picture.cells.size * CELL_BYTES;
      this.stretches.push({ start, deltas: [], bytes });
    }
    this.bytes += bytes;
    while (this.bytes > this.mostBytes && this.stretches.length > 1) {
      this.bytes -= this.stretches.shift()?.bytes ?? 0;
    }
  }

  clear() {
    this.stretches = [];
    this.bytes = 0;
    this.shown = null;
  }

  /**
   * The last picture of `step`, or of the last step before it that had one; null when that is
   * not kept. It changes with the next call.
   * @param {number} step
   * @returns {Picture | null}
   */
  pictureOf(step) {
    let place = this.stretches.length - 1;
    while (place >= 0 && this.stretches[place].start.step > step) place--;
    const stretch = this.stretches[place];
    if (!stretch) return null;
    let count = 0;
    while (count < stretch.deltas.length && stretch.deltas[count].frame.step <= step) count++;
    const { shown } = this;
    const goesOn = shown !== null && shown.stretch === stretch && shown.count <= count;
    const picture = goesOn && shown ? shown.picture : stretch.start.clone();
    for (let k = goesOn && shown ? shown.count : 0; k < count; k++) {
      picture.apply(stretch.deltas[k].frame, stretch.deltas[k].columns);
    }
    this.shown = { stretch, count, picture };
    return picture;
  }
}
