// @ts-check
/**
 * What the timeline draws: one entry per frame, and for each request what it did in it. Folded
 * from pictures as they come; a live stream may leave out steps, then an entry spans several.
 */

/** @typedef {import("./picture.js").Picture} Picture */
/** @typedef {import("./picture.js").Stat} Stat */

/**
 * @typedef {object} Entry
 * @property {number} step
 * @property {number} from       first step that the entry stands for
 * @property {Stat} stat
 * @property {string[]} preempted ids of the requests preempted since the entry before
 */

/**
 * `waiting` was not computed, `prefill`, `decode` and `recompute` were; `absent` has no mark.
 * @typedef {"waiting" | "prefill" | "decode" | "recompute"} Work
 */

/** @typedef {{work: Work, tokens: number, cached: number, blocks: number, preempted: boolean}} Mark */

/**
 * @typedef {object} Lane
 * @property {string} id
 * @property {number} slot
 * @property {number} first        number of its first entry
 * @property {number | null} last  number of the entry in which it finished
 * @property {boolean} isFull      ended because it reached max_tokens
 * @property {boolean} sawArrival
 * @property {Mark[]} marks        one per entry from `first` on
 */

/**
 * @typedef {object} Seen
 * @property {number} computed
 * @property {number} output
 * @property {number} preemptions
 * @property {number} lost
 * @property {boolean} isRunning
 * @property {number} most  tokens computed at the best of times
 */

const MAX_ENTRIES = 4096;
/** Entries dropped at once, so that dropping is rare. */
const DROP = 512;

export class History {
  /** @param {number} [maxEntries] */
  constructor(maxEntries = MAX_ENTRIES) {
    this.maxEntries = maxEntries;
    /** @type {Entry[]} */
    this.entries = [];
    /** @type {Map<string, Lane>} */
    this.lanes = new Map();
    /** Kinds of marks that have occurred, for the legend. @type {Set<string>} */
    this.occurred = new Set();
    /** @type {Map<string, Seen>} */
    this.seen = new Map();
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
   * Adds what `picture` shows now. A picture of the step that is already last replaces it.
   * @param {Picture} picture
   */
  record(picture) {
    const previous = this.entries.at(-1);
    const isAgain = previous !== undefined && picture.step <= previous.step;
    if (isAgain && picture.step < previous.step) this.clear();
    const again = isAgain && this.entries.length > 0;
    const number = again ? this.entries.length - 1 : this.entries.length;
    /** @type {Entry} */
    const entry = {
      step: picture.step,
      from:
        again && previous
          ? previous.from
          : previous && this.entries.length
            ? previous.step + 1
            : picture.step,
      stat: picture.stat,
      preempted: again && previous ? [...previous.preempted] : [],
    };
    this.entries[number] = entry;
    for (const row of picture.rows.values()) this.#recordRow(row, number, entry);
    this.mostWaiting = Math.max(this.mostWaiting, entry.stat.waiting);
    this.mostCached = Math.max(this.mostCached, entry.stat.cached);
    this.#note(picture, entry);
    if (this.entries.length > this.maxEntries + DROP) this.#drop(DROP);
  }

  clear() {
    this.entries = [];
    this.lanes.clear();
    this.seen.clear();
    this.mostWaiting = 0;
    this.mostCached = 0;
    this.dropped = 0;
  }

  /**
   * The number of the nearest entry with a hit, an eviction or a preemption, or null.
   * @param {number} from
   * @param {1 | -1} direction
   */
  nextEvent(from, direction) {
    for (let k = from + direction; k >= 0 && k < this.entries.length; k += direction) {
      const { stat, preempted } = this.entries[k];
      if (stat.hits || stat.evicted || preempted.length) return k;
    }
    return null;
  }

  /**
   * @param {import("./picture.js").Row} row
   * @param {number} number
   * @param {Entry} entry
   */
  #recordRow(row, number, entry) {
    const before = this.seen.get(row.id);
    let lane = this.lanes.get(row.id);
    if (lane?.last !== null && lane?.last !== undefined && lane.last < number) return;
    if (!lane) {
      if (row.state === "finished" && !(row.ended !== null && row.ended >= entry.from)) return;
      lane = {
        ...{ id: row.id, slot: row.slot, first: number, last: null, isFull: false },
        ...{ sawArrival: number > 0 || row.arrived >= entry.from, marks: [] },
      };
      this.lanes.set(row.id, lane);
    }
    if (row.slot < 254) lane.slot = row.slot;
    const mark = markOf(row, before, entry.stat);
    const place = number - lane.first;
    if (place < lane.marks.length) mergeMark(lane.marks, place, mark);
    else lane.marks.push(mark);
    if (mark.preempted && !entry.preempted.includes(row.id)) entry.preempted.push(row.id);
    if (row.state === "finished") {
      lane.last = number;
      lane.isFull = row.max !== null && row.output >= row.max;
    }
    this.seen.set(row.id, {
      ...{
        computed: row.computed,
        output: row.output,
        preemptions: row.preemptions,
        lost: row.lost,
      },
      isRunning: row.state === "running",
      // What a preemption gave up says how far it was, even when no frame came in between.
      most: Math.max(before?.most ?? 0, row.computed, row.lost - (before?.lost ?? row.lost)),
    });
  }

  /**
   * @param {Picture} picture
   * @param {Entry} entry
   */
  #note(picture, entry) {
    const { stat } = entry;
    const add = (/** @type {string} */ name, /** @type {unknown} */ is) => {
      if (is) this.occurred.add(name);
    };
    add("null", picture.numBlocks);
    add("in_use", stat.used);
    add("shared", stat.shared);
    add("kept", stat.kept);
    add("empty", stat.empty);
    add("hit", stat.hits);
    add("evicted", stat.evicted);
    add("written", stat.scheduled);
    add("next", picture.next.length);
    add(
      "next_loses",
      picture.next.slice(0, 3).some((block) => (picture.state[block] & 0xf) === 2),
    );
    add("decode", stat.decode);
    add("prefill", stat.prefill);
    add("recompute", stat.recompute);
    add("cached", stat.cached);
    add("waiting", stat.waiting);
    add("preempted", entry.preempted.length);
    add("arrived", this.lanes.size);
    add("finished", stat.finished);
  }

  /** @param {number} count */
  #drop(count) {
    this.entries.splice(0, count);
    this.dropped += count;
    for (const [id, lane] of this.lanes) {
      if (lane.last !== null && lane.last < count) {
        this.lanes.delete(id);
        this.seen.delete(id);
        continue;
      }
      const cut = Math.max(0, count - lane.first);
      lane.marks.splice(0, cut);
      lane.sawArrival &&= cut === 0;
      lane.first = Math.max(0, lane.first - count);
      if (lane.last !== null) lane.last -= count;
    }
  }
}

/**
 * What a request did between two pictures.
 * @param {import("./picture.js").Row} row
 * @param {Seen | undefined} before
 * @param {Stat} stat
 * @returns {Mark}
 */
function markOf(row, before, stat) {
  const preempted = row.preemptions > (before?.preemptions ?? 0);
  const start = before && !preempted ? before.computed : 0;
  const advanced = row.computed - start;
  if (row.state === "finished" && advanced <= 0 && before?.isRunning) {
    // Its last token was computed in the entry before; in this one it only ended.
    return { work: "decode", tokens: 0, cached: 0, blocks: row.blocks, preempted };
  }
  if (row.state === "waiting" || row.state === "preempted" || advanced <= 0) {
    return { work: "waiting", tokens: 0, cached: 0, blocks: row.blocks, preempted };
  }
  const isFirstSight = before === undefined && row.output > 1;
  const cached = start === 0 && !isFirstSight ? Math.min(row.cached, advanced, stat.cached) : 0;
  const tokens = advanced - cached;
  const most = Math.max(before?.most ?? 0, row.lost - (before?.lost ?? row.lost));
  /** @type {Work} */
  let work = "decode";
  if (most > start + cached) work = "recompute";
  else if (start + cached < row.prompt && !isFirstSight) work = "prefill";
  return { work, tokens, cached, blocks: row.blocks, preempted };
}

/**
 * A second picture of the same entry: what was computed in it stays computed.
 * @param {Mark[]} marks
 * @param {number} place
 * @param {Mark} mark
 */
function mergeMark(marks, place, mark) {
  const old = marks[place];
  if (mark.work === "waiting") old.preempted ||= mark.preempted;
  else if (old.work === "waiting")
    marks[place] = { ...mark, preempted: old.preempted || mark.preempted };
  else old.tokens += mark.tokens;
}
