// @ts-check
/**
 * What the timeline draws: one entry per step, and for each request what it did. Each frame says
 * how its step stands and how those ended that had no frame of their own.
 */

/** @typedef {import("./picture.js").Picture} Picture */
/** @typedef {import("./picture.js").Stat} Stat */
/** @typedef {import("./picture.js").Did} Did */

/**
 * @typedef {object} Entry
 * @property {number} step
 * @property {number} from        first step that the entry stands for
 * @property {number} time        seconds since the stream began
 * @property {Stat} stat
 * @property {string[]} preempted ids of the requests preempted in these steps
 * @property {boolean} [stopped]  the engine stood in it while there were breakpoints
 */

/** @typedef {"waiting" | "prefill" | "decode" | "recompute"} Work */

/** @typedef {{work: Work, tokens: number, cached: number, blocks: number, preempted: boolean}} Mark */

/**
 * @typedef {object} Lane
 * @property {string} id
 * @property {number} slot
 * @property {number} first        the first step it could be in
 * @property {number | null} last  the step in which it ended
 * @property {boolean} isFull      ended because it reached max_tokens
 * @property {Did[]} did           what it computed, in which steps; it waited in the others
 * @property {[number, number][]} blocks  from which step on it held how many
 * @property {number} seen         the last step of which it was told
 */

const MAX_ENTRIES = 4096;
/** Entries dropped at once, so that dropping is rare. */
const DROP = 512;
const RANK = { waiting: 0, decode: 1, prefill: 2, recompute: 3 };
/** @type {Record<string, Work>} */
const WORK = { p: "prefill", d: "decode", r: "recompute" };

export class History {
  /** @param {number} [maxEntries] */
  constructor(maxEntries = MAX_ENTRIES) {
    this.maxEntries = maxEntries;
    /** Oldest first; an entry is replaced, never changed. @type {Entry[]} */
    this.entries = [];
    /** @type {Map<string, Lane>} */
    this.lanes = new Map();
    /** Kinds of marks that have occurred, for the legend. @type {Set<string>} */
    this.occurred = new Set();
    /** Highest values so far, for the scales. */
    this.mostWaiting = 0;
    this.mostCached = 0;
    /** Entries dropped at the old end. */
    this.dropped = 0;
  }

  get length() {
    return this.entries.length;
  }

  /**
   * Adds what `picture` shows now, and the steps before it that it tells of. A picture of a step
   * that is known replaces it. One of an earlier step begins a new run, except in a replay.
   * @param {Picture} picture
   * @param {boolean} [isReplay]
   */
  record(picture, isReplay = false) {
    const last = this.entries.at(-1);
    if (last && picture.step < last.step && !isReplay) this.clear();
    for (const entry of picture.log) this.#put(entry);
    const { step, time, stat, preempted } = picture;
    // A replay stands wherever its reader has put it, which is no event of the run.
    const stopped = !isReplay && picture.phase === "paused" && picture.breaks.length > 0;
    this.#put({ from: step, step, time, stat, preempted, stopped });
    for (const row of picture.rows.values()) this.#recordRow(row, picture.step);
    this.#note(picture);
    if (this.entries.length > this.maxEntries + DROP) this.#drop(DROP);
  }

  clear() {
    this.entries = [];
    this.lanes.clear();
    this.mostWaiting = 0;
    this.mostCached = 0;
    this.dropped = 0;
  }

  /**
   * The number of the entry that has `step`, or of the last one before it; -1 before all.
   * @param {number} step
   */
  entryOf(step) {
    let from = 0;
    let to = this.entries.length;
    while (from < to) {
      const middle = (from + to) >> 1;
      if (this.entries[middle].from <= step) from = middle + 1;
      else to = middle;
    }
    return from - 1;
  }

  /**
   * The number of the nearest entry with a hit, an eviction, a preemption or a stop at a
   * breakpoint, or null.
   * @param {number} from
   * @param {1 | -1} direction
   */
  nextEvent(from, direction) {
    for (let k = from + direction; k >= 0 && k < this.entries.length; k += direction) {
      const { stat, preempted, stopped } = this.entries[k];
      if (stat.hits || stat.evicted || preempted.length || stopped) return k;
    }
    return null;
  }

  /**
   * What a request did in an entry; of several steps what must not be lost. Null before it came
   * and after its end.
   * @param {Lane | undefined} lane
   * @param {number} number
   * @returns {Mark | null}
   */
  markAt(lane, number) {
    const entry = this.entries[number];
    if (!lane || !entry) return null;
    const { from, step } = entry;
    if (step < lane.first || (lane.last !== null && from > lane.last)) return null;
    /** @type {Mark} */
    const mark = { work: "waiting", tokens: 0, cached: 0, blocks: 0, preempted: false };
    for (let k = lane.did.length - 1; k >= 0; k--) {
      const [start, count, letter, tokens, cached = 0] = lane.did[k];
      if (start > step) continue;
      if (letter === "x") {
        mark.preempted ||= start >= from;
        if (start < from) break;
        continue;
      }
      if (start + count - 1 < from) break;
      const steps = Math.min(step, start + count - 1) - Math.max(from, start) + 1;
      mark.tokens += steps * tokens;
      if (start >= from) mark.cached += cached;
      const work = WORK[letter] ?? "decode";
      if (RANK[work] > RANK[mark.work]) mark.work = work;
    }
    for (const [since, blocks] of lane.blocks) if (since <= step) mark.blocks = blocks;
    return mark;
  }

  /** @param {Entry} entry */
  #put(entry) {
    const { entries } = this;
    const place = this.entryOf(entry.step);
    const there = entries[place];
    if (there && entry.step <= there.step) {
      // A part of an entry that spans more says nothing new.
      const stopped = entry.stopped || there.stopped;
      if (entry.step === there.step) entries[place] = { ...entry, from: there.from, stopped };
    } else if (place === entries.length - 1) {
      const from = there ? Math.min(Math.max(entry.from, there.step + 1), entry.step) : entry.from;
      entries.push({ ...entry, from });
    }
    this.mostWaiting = Math.max(this.mostWaiting, entry.stat.waiting);
    this.mostCached = Math.max(this.mostCached, entry.stat.cached);
    this.#noteStat(entry);
  }

  /**
   * @param {import("./picture.js").Row} row
   * @param {number} step
   */
  #recordRow(row, step) {
    let lane = this.lanes.get(row.id);
    // An id that comes again begins another lane.
    if (lane && lane.first !== row.arrived + 1) lane = undefined;
    if (!lane) {
      if (row.ended !== null && row.ended < (this.entries[0]?.from ?? 0)) return;
      lane = {
        ...{ id: row.id, slot: row.slot, first: row.arrived + 1, last: null, isFull: false },
        ...{ did: row.did, blocks: [], seen: step },
      };
      this.lanes.set(row.id, lane);
    }
    if (row.slot < 254) lane.slot = row.slot;
    // A replay that has jumped back tells less than is known.
    if (step < lane.seen) return;
    lane.seen = step;
    lane.did = row.did;
    lane.last = row.state === "finished" ? (row.ended ?? step) : null;
    lane.isFull = row.max !== null && row.output >= row.max;
    if ((lane.blocks.at(-1)?.[1] ?? 0) !== row.blocks) lane.blocks.push([step, row.blocks]);
  }

  /** @param {Picture} picture */
  #note(picture) {
    this.#add("null", picture.numBlocks);
    this.#add("arrived", this.lanes.size);
    this.#add("next", picture.next.length);
    this.#add(
      "next_loses",
      picture.next.slice(0, 3).some((block) => (picture.state[block] & 0xf) === 2),
    );
  }

  /** @param {Entry} entry */
  #noteStat({ stat, preempted }) {
    this.#add("in_use", stat.used);
    this.#add("shared", stat.shared);
    this.#add("kept", stat.kept);
    this.#add("empty", stat.empty);
    this.#add("hit", stat.hits);
    this.#add("evicted", stat.evicted);
    this.#add("written", stat.scheduled);
    this.#add("decode", stat.decode);
    this.#add("prefill", stat.prefill);
    this.#add("recompute", stat.recompute);
    this.#add("cached", stat.cached);
    this.#add("waiting", stat.waiting);
    this.#add("preempted", preempted.length);
    this.#add("finished", stat.finished);
  }

  /**
   * @param {string} name
   * @param {unknown} is
   */
  #add(name, is) {
    if (is) this.occurred.add(name);
  }

  /** @param {number} count */
  #drop(count) {
    this.entries.splice(0, count);
    this.dropped += count;
    const first = this.entries[0].from;
    for (const [id, lane] of this.lanes) {
      if (lane.last !== null && lane.last < first) this.lanes.delete(id);
    }
  }
}
