// @ts-check
/**
 * The picture that every view draws: frames go in, columns, rows and words come out.
 * `docs/picture.md` describes the frames. Nothing here touches a document.
 */
import { checkLengths, OF_BINS, OF_BLOCKS } from "./columns.js";
import { completeRow, keepTokens, mergeRow } from "./rows.js";

/** @typedef {import("./frames.js").Stat} Stat */
/** @typedef {import("./frames.js").Info} Info */
/** @typedef {import("./frames.js").Row} Row */
/** @typedef {import("./frames.js").Did} Did */
/** @typedef {import("./frames.js").SentToken} SentToken */
/** @typedef {import("./frames.js").Token} Token */
/** @typedef {import("./frames.js").SentRow} SentRow */
/** @typedef {import("./frames.js").StructTree} StructTree */
/** @typedef {import("./frames.js").Cell} Cell */
/** @typedef {import("./frames.js").Break} Break */
/** @typedef {import("./frames.js").TreeNode} TreeNode */
/** @typedef {import("./frames.js").Tree} Tree */
/** @typedef {import("./frames.js").SentTree} SentTree */
/** @typedef {import("./frames.js").Columns} Columns */
/** @typedef {import("./frames.js").Bins} Bins */
/** @typedef {import("./frames.js").Frame} Frame */
/** @typedef {import("./frames.js").Changes} Changes */
/** @typedef {import("./frames.js").Mass} Mass */

export const VERSION = 1;
export const EMPTY = 0;
export const IN_USE = 1;
export const KEPT = 2;
export const NULL = 3;
export const HIT = 0x10;
export const EVICTED = 0x20;
export const WRITTEN = 0x40;
export const SHARED = 0x80;

/** The counts of a step in a log, in their order. */
export const LOG_NAMES = /** @type {(keyof Stat)[]} */ ([
  ...["used", "kept", "empty", "shared", "hits", "evicted", "running", "waiting", "finished"],
  ...["scheduled", "decode", "prefill", "recompute", "cached", "prompt_tokens", "cached_tokens"],
  ...["output_tokens", "preemptions", "evictions", "step_ms", "device_ms"],
]);

/** @type {ReadonlyMap<number, number>} */
const NO_LEVELS = new Map();
const COLUMNS = /** @type {const} */ (["slot", "state", "ref", "fill", "writtenFrom"]);
const NO_STAT = /** @type {Stat} */ ({
  ...{ used: 0, kept: 0, empty: 0, shared: 0, hits: 0, evicted: 0 },
  ...{ running: 0, waiting: 0, finished: 0 },
  ...{ scheduled: 0, decode: 0, prefill: 0, recompute: 0, cached: 0 },
  ...{ prompt_tokens: 0, cached_tokens: 0, output_tokens: 0, preemptions: 0, evictions: 0 },
  ...{ step_ms: null, device_ms: null, tokens_per_s: null },
});
/** Everything that one stream of frames has said so far. */
export class Picture {
  constructor() {
    /** Number of the last frame applied, -1 before the first. */
    this.seq = -1;
    this.epoch = -1;
    this.step = 0;
    this.boundary = "";
    this.time = 0;
    this.phase = "loading";
    this.note = "";
    /** Place of the last struct's kind among the five, -1 before the first. */
    this.at = -1;
    this.where = "";
    /** Of an engine that stands: which steps its device has run without it, in a sentence. */
    this.inFlight = "";
    /** @type {StructTree | null} */
    this.struct = null;
    /** Requests preempted in this step. @type {string[]} */
    this.preempted = [];
    /** Of requests admitted in this step: where the cache ended, and why. @type {Record<string, string>} */
    this.misses = {};
    /** Of each breakpoint its name, the place of its kind, whether it is on. @type {Break[]} */
    this.breaks = [];
    /** Of a replay that plays: 1 is as it was recorded. @type {number | null} */
    this.speed = null;
    /** @type {Tree} */
    this.tree = { nodes: new Map(), hits: {}, waiting: [], note: "" };
    /** Steps before this one, as the last frame told them. @type {import("./history.js").Entry[]} */
    this.log = [];
    /** @type {Info | null} */
    this.info = null;
    /** @type {Stat} */
    this.stat = NO_STAT;
    /** @type {number[]} */
    this.next = [];
    /** In the order in which they came. @type {Map<string, Row>} */
    this.rows = new Map();
    /** Words for blocks that are not empty. @type {Map<number, Cell>} */
    this.cells = new Map();
    this.slot = new Uint8Array(0);
    this.state = new Uint8Array(0);
    this.ref = new Uint8Array(0);
    this.fill = new Uint8Array(0);
    /** First slot of a block that was written in this step. */
    this.writtenFrom = new Uint8Array(0);
    /** A pool too large to be told block by block; the columns above are empty then. */
    this.bins = /** @type {Bins | null} */ (null);
    /** Of a pool in bins, the blocks that are told singly. @type {{first: number, count: number} | null} */
    this.window = null;
    /** Which blocks, or bins, the step's attention went to; null: nobody measured it. @type {Mass | null} */
    this.mass = null;
    /** The same for the blocks that are told singly. */
    this.windowLevels = NO_LEVELS;
    /** @type {Set<Tracker>} */
    this.trackers = new Set();
  }

  get numBlocks() {
    return this.bins ? (this.info?.num_blocks ?? 0) : this.state.length;
  }

  /**
   * Applies one frame. `"gap"` means that a full frame is needed, `"old"` that it was dropped;
   * in both cases nothing has changed.
   * @param {Frame} frame
   * @param {Columns} columns
   * @returns {"applied" | "gap" | "old"}
   * @throws {Error} when the frame is of another version or contradicts itself
   */
  apply(frame, columns) {
    if (frame.v !== VERSION) {
      throw new Error(`frame has version ${frame.v}, this view reads ${VERSION}; update lmscope`);
    }
    if (frame.epoch < this.epoch) return "old";
    if (frame.epoch === this.epoch && frame.seq <= this.seq) return "old";
    const follows = frame.epoch === this.epoch && frame.seq === this.seq + 1;
    if (frame.k === "delta" && !follows) return "gap";

    if (frame.k === "full") this.#applyFull(frame, columns, follows);
    else this.#applyDelta(frame, columns);
    this.seq = frame.seq;
    this.epoch = frame.epoch;
    this.step = frame.step;
    this.boundary = frame.boundary;
    this.time = frame.time;
    this.phase = frame.phase;
    this.note = frame.note ?? "";
    this.stat = { ...NO_STAT, ...frame.stat };
    this.at = frame.at ?? -1;
    this.where = frame.where ?? "";
    this.inFlight = frame.in_flight ?? "";
    if (frame.struct !== undefined) this.struct = frame.struct;
    this.preempted = frame.preempted ?? [];
    this.misses = frame.misses ?? {};
    if (frame.tree) {
      const before = frame.k === "full" ? new Map() : this.tree.nodes;
      this.tree = mergeTree(before, frame.tree);
    }
    if (frame.window && this.bins) this.#applyWindow(frame.window);
    this.#applyMass(frame.mass);
    if (frame.speed !== undefined) this.speed = frame.speed;
    if (frame.breaks) this.breaks = frame.breaks;
    this.log = (frame.log ?? []).map(entryOf);
    const before = this.next;
    this.next = frame.next ?? [];
    this.#changed(({ blocks }) => {
      for (const block of before) blocks.add(block);
      for (const block of this.next) blocks.add(block);
    });
    return "applied";
  }

  /** Another picture of the same moment; neither follows the other. */
  clone() {
    const other = Object.assign(new Picture(), this);
    other.rows = new Map(this.rows);
    other.cells = new Map(this.cells);
    // What was told singly in a pool of bins would be most of a copy.
    if (this.bins) other.forgetWindow();
    else for (const name of COLUMNS) other[name] = this[name].slice();
    other.bins = this.bins && copyBins(this.bins);
    other.trackers = new Set();
    return other;
  }

  /** Starts to note what changes, for one view. */
  track() {
    const tracker = new Tracker(() => this.trackers.delete(tracker));
    this.trackers.add(tracker);
    return tracker;
  }

  /**
   * The highest level of attention among the blocks from `from` to before `to`, 0 for almost none.
   * @param {number} from
   * @param {number} [to]
   */
  levelOf(from, to = from + 1) {
    if (!this.mass) return 0;
    const { bins, window } = this;
    const isTold = window && from >= window.first && to <= window.first + window.count;
    const size = bins && !isTold ? bins.size : 1;
    const levels = isTold ? this.windowLevels : this.mass.levels;
    let most = 0;
    for (let place = Math.floor(from / size); place * size < to; place++)
      most = Math.max(most, levels.get(place) ?? 0);
    return most;
  }

  /**
   * Ids of the requests that hold a block, or of the one that stored what is kept in it.
   * @param {number} block
   * @returns {string[]}
   */
  ownersOf(block) {
    const cell = this.cells.get(block);
    if (!cell) return [];
    if ((this.state[block] & 0xf) === IN_USE) return cell[1];
    return cell[3] === null ? [] : [cell[3]];
  }

  /**
   * @param {Frame} frame
   * @param {Columns} columns
   * @param {boolean} follows  whether it comes right after the frame before
   */
  #applyFull(frame, columns, follows) {
    this.info = frame.info ?? this.info;
    const size = columns.state.length;
    checkLengths(columns, OF_BLOCKS.slice(1), size);
    if (frame.bin) checkLengths(columns, OF_BINS, columns.used.length);
    else checkLengths(columns, OF_BLOCKS, size);
    this.bins = frame.bin ? copyBins({ size: frame.bin, ...columns }) : null;
    const before =
      follows && size === this.numBlocks ? { state: this.state, fill: this.fill } : null;
    this.window = null;
    this.writtenFrom = new Uint8Array(size);
    if (before) {
      for (let block = 0; block < size; block++) {
        this.writtenFrom[block] = writtenFrom(
          before.state[block],
          before.fill[block],
          columns.state[block],
        );
      }
    }
    this.slot = frame.bin ? new Uint8Array(0) : Uint8Array.from(columns.slot);
    this.state = Uint8Array.from(columns.state);
    this.ref = Uint8Array.from(columns.ref);
    this.fill = Uint8Array.from(columns.fill);
    const known = this.rows;
    this.rows = new Map(
      frame.rows.map((row) => [row.id, keepTokens(completeRow(row), known.get(row.id))]),
    );
    this.cells = new Map((frame.cells ?? []).map((cell) => [cell[0], cell]));
    this.#changed((changes) => {
      changes.all = true;
      changes.list = true;
    });
  }

  /**
   * @param {Frame} frame
   * @param {Columns} columns
   */
  #applyDelta(frame, columns) {
    const changed = this.bins ? this.#applyBins(columns, this.bins) : this.#applyBlocks(columns);
    for (const cell of frame.cells ?? []) this.cells.set(cell[0], cell);
    let isNewList = (frame.gone?.length ?? 0) > 0;
    for (const id of frame.gone ?? []) this.rows.delete(id);
    for (const row of frame.rows) {
      const old = this.rows.get(row.id);
      if (!old) isNewList = true;
      this.rows.set(row.id, old ? mergeRow(old, row, frame.step) : completeRow(row));
    }
    this.#changed((changes) => {
      for (const block of changed) changes.blocks.add(block);
      for (const cell of frame.cells ?? []) changes.blocks.add(cell[0]);
      for (const row of frame.rows) changes.rows.add(row.id);
      changes.list ||= isNewList;
    });
  }

  /**
   * @param {Columns} columns
   * @returns {Iterable<number>} the blocks that changed
   */
  #applyBlocks(columns) {
    const ids = columns.i ?? new Uint32Array(0);
    checkLengths(columns, OF_BLOCKS, ids.length);
    if (ids.length && ids[ids.length - 1] >= this.numBlocks) {
      throw new Error(`frame names block ${ids[ids.length - 1]}, the pool has ${this.numBlocks}`);
    }
    for (let k = 0; k < ids.length; k++) {
      const block = ids[k];
      this.writtenFrom[block] = writtenFrom(this.state[block], this.fill[block], columns.state[k]);
      this.slot[block] = columns.slot[k];
      this.state[block] = columns.state[k];
      this.ref[block] = columns.ref[k];
      this.fill[block] = columns.fill[k];
      if ((columns.state[k] & 0xf) === EMPTY) this.cells.delete(block);
    }
    return ids;
  }

  /**
   * @param {Columns} columns
   * @param {Bins} bins
   * @returns {Iterable<number>} the first block of each bin that changed
   */
  #applyBins(columns, bins) {
    const ids = columns.i ?? new Uint32Array(0);
    checkLengths(columns, OF_BINS, ids.length);
    if (ids.length && ids[ids.length - 1] >= bins.used.length) {
      throw new Error(`frame names bin ${ids[ids.length - 1]}, the pool has ${bins.used.length}`);
    }
    for (let k = 0; k < ids.length; k++)
      for (const name of OF_BINS) bins[name][ids[k]] = columns[name][k];
    return Array.from(ids, (bin) => bin * bins.size);
  }

  /** Back to bins alone. */
  forgetWindow() {
    this.window = null;
    this.windowLevels = NO_LEVELS;
    this.cells = new Map();
    for (const name of COLUMNS) this[name] = new Uint8Array(0);
  }

  /** @param {import("./frames.js").Window} window */
  #applyWindow({ first, count, blocks, cells, mass = [] }) {
    if (this.state.length !== this.numBlocks)
      for (const name of COLUMNS) this[name] = new Uint8Array(this.numBlocks);
    const last = Math.min(first + count, this.numBlocks);
    for (const name of COLUMNS) this[name].fill(0, first, last);
    for (const [block, slot, state, ref, fill] of blocks) {
      if (block < first || block >= last) throw new Error(`block ${block} is not in its window`);
      this.slot[block] = slot;
      this.state[block] = state;
      this.ref[block] = ref;
      this.fill[block] = fill;
      if (state & WRITTEN) this.writtenFrom[block] = Math.max(0, fill - 1);
    }
    this.window = { first, count: last - first };
    this.windowLevels = levelsOf(mass);
    this.cells = new Map(cells.map((cell) => [cell[0], cell]));
    this.#changed((changes) => {
      changes.all = true;
    });
  }

  /** @param {import("./frames.js").SentMass | undefined} sent */
  #applyMass(sent) {
    const before = this.mass?.levels ?? NO_LEVELS;
    const after = sent ? levelsOf(sent.of) : NO_LEVELS;
    this.mass = sent ? { top: sent.top, levels: after } : null;
    const size = this.bins?.size ?? 1;
    this.#changed(({ mass }) => {
      for (const [id, level] of before) if (after.get(id) !== level) mass.add(id * size);
      for (const id of after.keys()) if (!before.has(id)) mass.add(id * size);
    });
  }

  /** @param {(changes: Changes) => void} note */
  #changed(note) {
    for (const tracker of this.trackers) note(tracker.changes);
  }
}

/** What has changed since a view has last looked; at first, everything. */
export class Tracker {
  /** @param {() => void} end  stops it */
  constructor(end) {
    /** @type {Changes} */
    this.changes = { ...noChanges(), all: true, list: true };
    this.end = end;
  }

  /** @returns {Changes} */
  take() {
    const { changes } = this;
    this.changes = noChanges();
    return changes;
  }
}

/** @returns {Changes} */
function noChanges() {
  return { all: false, blocks: new Set(), mass: new Set(), rows: new Set(), list: false };
}

/**
 * @param {number[]} pairs  id, level, id, level, ...
 * @returns {Map<number, number>}
 */
function levelsOf(pairs) {
  const levels = new Map();
  for (let k = 0; k < pairs.length; k += 2) levels.set(pairs[k], pairs[k + 1]);
  return levels;
}

/**
 * Tokens that were in a block before this step wrote to it: its fill when the block goes on,
 * none when it was given out anew.
 * @param {number} stateBefore
 * @param {number} fillBefore
 * @param {number} state
 */
function writtenFrom(stateBefore, fillBefore, state) {
  const goesOn = (stateBefore & 0xf) === IN_USE && (state & (EVICTED | HIT)) === 0;
  return goesOn ? fillBefore : 0;
}

/**
 * @param {Bins} bins
 * @returns {Bins}
 */
function copyBins({ size, used, kept, slot, flags }) {
  return { size, used: used.slice(), kept: kept.slice(), slot: slot.slice(), flags: flags.slice() };
}

/**
 * @param {Map<number, TreeNode>} before
 * @param {SentTree} sent
 * @returns {Tree}
 */
function mergeTree(before, { nodes, gone = [], hits = {}, waiting = [], note = "" }) {
  const merged = new Map(before);
  for (const sent of nodes) {
    const [id, parent, start, count, text, readers, keptBy = null] = sent;
    const old = merged.get(id);
    // One that has only become longer, or shorter, says no more than that.
    if (sent.length === 2 && old) merged.set(id, { ...old, count: parent });
    else merged.set(id, { id, parent, start, count, text, readers, keptBy });
  }
  for (const id of gone) merged.delete(id);
  return { nodes: merged, hits, waiting, note };
}

/**
 * @param {any[]} logged
 * @returns {import("./history.js").Entry}
 */
function entryOf(logged) {
  const [from, step, time, ...counts] = logged;
  const preempted = counts.pop() ?? [];
  const stat = /** @type {any} */ ({ ...NO_STAT });
  LOG_NAMES.forEach((name, k) => {
    stat[name] = counts[k];
  });
  return { from, step, time, stat, preempted };
}
