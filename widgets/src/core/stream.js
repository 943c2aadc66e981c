// @ts-check
/**
 * What comes from Python, for all views of one model: it keeps the picture and its history, asks
 * for a full frame when one is missing, and acknowledges what the views have drawn.
 */
import { columnsFromBuffers } from "./columns.js";
import { History } from "./history.js";
import { inflate } from "./inflate.js";
import { Picture } from "./picture.js";
import { Reel } from "./reel.js";

/** @typedef {import("./picture.js").Frame} Frame */
/** @typedef {import("./picture.js").Row} Row */

/**
 * @typedef {object} Viewer
 * @property {() => boolean} isHidden
 * @property {() => void} show            the picture has changed
 * @property {(words: string) => void} fail  one line about what went wrong, "" when it is mended
 * @property {(reply: any) => void} answer
 * @property {() => void} gone            nobody listens any more
 */

const ASK_AGAIN_MS = 1000;
/** Frames that are acknowledged together; Python sends one more ahead of that. */
const ACKNOWLEDGED_TOGETHER = 4;
const ACKNOWLEDGE_AFTER_MS = 500;
const MOST_ERRORS = 20;

export class Stream {
  /**
   * @param {(message: unknown) => void} post  throws when nobody listens any more
   * @param {{isReplay?: boolean}} [options]  a replay may jump back, and its later steps stay
   */
  constructor(post, { isReplay = false } = {}) {
    this.isReplay = isReplay;
    this.picture = new Picture();
    this.history = new History();
    this.reel = new Reel();
    this.frames = 0;
    this.gaps = 0;
    /** @type {string[]} */
    this.errors = [];
    /** @type {Set<Viewer>} */
    this.viewers = new Set();
    this.post = post;
    /** Done when the last of what is being unpacked, or waits behind that, has been taken. */
    this.unpacking = /** @type {Promise<void> | null} */ (null);
    this.isWaitingForFull = false;
    this.askedAt = Number.NEGATIVE_INFINITY;
    /** Number of the last full frame. */
    this.fullSeq = -1;
    /** What is on a screen, and what of it was said. */
    this.drawn = { seq: -1, hidden: false, epoch: -1 };
    this.acknowledged = this.drawn;
    this.acknowledging = /** @type {ReturnType<typeof setTimeout> | null} */ (null);
  }

  /**
   * @param {Viewer} viewer
   * @returns {() => void} what ends it
   */
  add(viewer) {
    this.viewers.add(viewer);
    this.send({ k: "ready" });
    return () => {
      this.viewers.delete(viewer);
      if (!this.viewers.size) this.#stopAcknowledging();
    };
  }

  /** @param {unknown} message */
  send(message) {
    try {
      this.post(message);
    } catch {
      for (const viewer of this.viewers) viewer.gone();
    }
  }

  /**
   * Takes any message; those it does not know are ignored.
   * @param {any} message
   * @param {(DataView | ArrayBuffer)[]} [buffers]
   */
  receive(message, buffers = []) {
    const isPacked = message?.k === "packed";
    if (!isPacked && !this.unpacking) {
      this.#receive(message, buffers);
      return;
    }
    // Unpacking takes its time, and what comes meanwhile must not overtake it.
    const header = isPacked ? inflate(buffers[0]) : Promise.resolve(message);
    const rest = isPacked ? buffers.slice(1) : buffers;
    const mine = Promise.all([header, this.unpacking])
      .then(([unpacked]) => this.#receive(unpacked, rest))
      .catch((error) => {
        this.report(error);
        this.#ask();
      })
      .then(() => {
        if (this.unpacking === mine) this.unpacking = null;
      });
    this.unpacking = mine;
  }

  /**
   * @param {any} message
   * @param {(DataView | ArrayBuffer)[]} buffers
   */
  #receive(message, buffers) {
    try {
      if (message?.k === "full" || message?.k === "delta") this.#take(message, buffers);
      else if (message?.k === "reply") for (const viewer of this.viewers) viewer.answer(message);
    } catch (error) {
      this.report(error);
      this.#ask();
    }
  }

  /** @param {unknown} error */
  report(error) {
    const words = error instanceof Error ? error.message : String(error);
    this.errors.push(words);
    this.errors.splice(0, this.errors.length - MOST_ERRORS);
    for (const viewer of this.viewers) viewer.fail(words);
  }

  /**
   * Says that the picture is on a screen, or would be if a view were visible. A kernel tells that
   * it is busy and idle again for each message, and a notebook draws itself anew for both. So the
   * frames that Python sends ahead are acknowledged together.
   */
  acknowledge() {
    const { seq, epoch } = this.picture;
    const hidden = [...this.viewers].every((viewer) => viewer.isHidden());
    const last = this.acknowledged;
    const isNews = hidden !== last.hidden || epoch !== last.epoch;
    if (seq < 0 || (!isNews && seq === last.seq)) return;
    this.drawn = { seq, hidden, epoch };
    const isFull = this.fullSeq > last.seq;
    if (isNews || hidden || isFull || seq - last.seq >= ACKNOWLEDGED_TOGETHER) this.#sayDrawn();
    else this.acknowledging ??= setTimeout(() => this.#sayDrawn(), ACKNOWLEDGE_AFTER_MS);
  }

  #sayDrawn() {
    this.#stopAcknowledging();
    this.acknowledged = this.drawn;
    this.send({ k: "ack", ...this.drawn });
  }

  #stopAcknowledging() {
    if (this.acknowledging !== null) clearTimeout(this.acknowledging);
    this.acknowledging = null;
  }

  /**
   * @param {Frame} frame
   * @param {(DataView | ArrayBuffer)[]} buffers
   */
  #take(frame, buffers) {
    const columns = columnsFromBuffers(frame, buffers);
    const result = this.picture.apply(frame, columns);
    if (result === "gap") {
      if (!this.isWaitingForFull) this.gaps++;
      this.#ask();
    }
    if (result !== "applied") return;
    if (frame.k === "full") {
      this.fullSeq = frame.seq;
      this.isWaitingForFull = false;
      this.askedAt = Number.NEGATIVE_INFINITY;
    }
    this.history.record(this.picture, this.isReplay);
    this.reel.push(frame, columns, this.picture);
    this.frames++;
    for (const viewer of this.viewers) viewer.show();
    // A hidden page gets no animation frames: it keeps the picture and says so.
    if (this.viewers.size && [...this.viewers].every((viewer) => viewer.isHidden())) {
      this.acknowledge();
    }
  }

  #ask() {
    this.isWaitingForFull = true;
    if (Date.now() - this.askedAt < ASK_AGAIN_MS) return;
    this.askedAt = Date.now();
    this.send({ k: "resync" });
  }
}
