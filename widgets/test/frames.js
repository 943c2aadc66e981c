/**
 * Small streams of frames for tests, made by hand or by chance with a seed.
 */
import { columnsFromLists } from "../src/core/columns.js";
import { Picture } from "../src/core/picture.js";

export const STAT = {
  ...{ used: 0, kept: 0, empty: 0, shared: 0, hits: 0, evicted: 0, running: 0, waiting: 0 },
  ...{ finished: 0, scheduled: 0, decode: 0, prefill: 0, recompute: 0, cached: 0 },
  ...{ prompt_tokens: 0, cached_tokens: 0, output_tokens: 0, preemptions: 0, evictions: 0 },
  ...{ step_ms: null, device_ms: null, tokens_per_s: null },
};

export const INFO = {
  ...{ model: "demo", block_size: 4, num_blocks: 6, max_num_seqs: 8 },
  ...{ max_num_batched_tokens: 32, max_model_len: 128 },
};

export function row(id, more = {}) {
  return {
    ...{ id, slot: 0, state: "running", why: "decode: 1 token", prompt: 8, cached: 0, computed: 8 },
    ...{
      output: 1,
      lost: 0,
      max: 16,
      blocks: 2,
      shared: 0,
      preemptions: 0,
      arrived: 0,
      ended: null,
    },
    ...{ waited: 0, prompt_text: "Say something", text: " yes" },
    ...more,
  };
}

/** A full frame of a pool whose blocks are `[slot, state, ref, fill]`. */
export function full(blocks, more = {}) {
  const column = (k) => blocks.map((block) => block[k]);
  return {
    ...{ v: 1, k: "full", seq: 0, epoch: 1, step: 0, boundary: "", time: 0, phase: "live" },
    info: { ...INFO, num_blocks: blocks.length },
    ...{ stat: STAT, next: [], rows: [], cells: [], note: "" },
    columns: { slot: column(0), state: column(1), ref: column(2), fill: column(3) },
    ...more,
  };
}

/** A delta whose `blocks` are `[id, slot, state, ref, fill]`. */
export function delta(blocks, more = {}) {
  const column = (k) => blocks.map((block) => block[k]);
  return {
    ...{ v: 1, k: "delta", seq: 1, epoch: 1, step: 1, boundary: "", time: 0, phase: "live" },
    ...{ stat: STAT, next: [], rows: [], gone: [], cells: [], note: "" },
    columns: { i: column(0), slot: column(1), state: column(2), ref: column(3), fill: column(4) },
    ...more,
  };
}

export const NULL_BLOCK = [255, 3, 0, 0];
export const EMPTY_BLOCK = [255, 0, 0, 0];

export const columns = columnsFromLists;

/** The buffers of a message, each at an odd place of a larger buffer, as a socket gives them. */
export function buffers(frame) {
  const { i, slot, state, ref, fill, used, kept, flags } = columns(frame);
  const own = frame.bin ? [used, kept, slot, flags] : [slot, state, ref, fill];
  const parts = [i, ...own].filter(Boolean).map((part) => new Uint8Array(part.buffer));
  return parts.map((part) => {
    const padded = new Uint8Array(part.length + 3);
    padded.set(part, 3);
    return new DataView(padded.buffer, 3, part.length);
  });
}

export function pictureOf(...frames) {
  const picture = new Picture();
  for (const frame of frames) {
    const result = picture.apply(frame, columns(frame));
    if (result !== "applied") throw new Error(`frame ${frame.seq}: ${result}`);
  }
  return picture;
}

/** Numbers from 0 to 1, the same for a seed. */
export function chance(seed) {
  let state = seed;
  return () => {
    state = (state * 16807) % 2147483647;
    return state / 2147483647;
  };
}

/** A run by chance: its states after each step, as full frames and as deltas. */
export function randomRun(seed, { steps = 40, numBlocks = 24 } = {}) {
  const random = chance(seed);
  const pick = (n) => Math.floor(random() * n);
  let blocks = Array.from({ length: numBlocks }, (_, k) =>
    k ? [...EMPTY_BLOCK] : [...NULL_BLOCK],
  );
  let cells = new Map();
  const rows = new Map();
  const fulls = [];
  const deltas = [];
  for (let step = 0; step < steps; step++) {
    const before = {
      blocks: blocks.map((block) => [...block]),
      cells: new Map(cells),
      rows: new Map(rows),
    };
    blocks = blocks.map((block) => [block[0], block[1] & 0xf, block[2], block[3]]);
    cells = new Map([...cells].map(([id, cell]) => [id, [...cell.slice(0, 4), null, cell[5]]]));
    const gone = [];
    for (let k = 0; k < 4; k++) {
      const id = 1 + pick(numBlocks - 1);
      const state = pick(3);
      const flags = state === 1 ? [0, 0x10, 0x20, 0x40][pick(4)] : 0;
      blocks[id] =
        state === 0
          ? [...EMPTY_BLOCK]
          : [pick(8), state | flags, state === 1 ? 1 + pick(3) : 0, 1 + pick(4)];
      if (state === 0) cells.delete(id);
      else
        cells.set(id, [
          id,
          state === 1 ? [`r${pick(5)}`] : [],
          `words ${step}`,
          `r${pick(5)}`,
          null,
          "ab12",
        ]);
    }
    const id = `r${pick(5)}`;
    const old = rows.get(id);
    if (old && random() < 0.2) {
      rows.delete(id);
      gone.push(id);
    } else if (old)
      rows.set(id, {
        ...old,
        computed: old.computed + 1,
        output: old.output + 1,
        text: `${old.text} ${step}`,
      });
    else rows.set(id, row(id, { slot: pick(8), arrived: step, text: "" }));
    const shared = {
      seq: step,
      step,
      stat: { ...STAT, used: step },
      next: [1 + pick(numBlocks - 1)],
    };
    fulls.push(full(blocks, { ...shared, rows: [...rows.values()], cells: [...cells.values()] }));
    if (step === 0) {
      deltas.push(fulls[0]);
      continue;
    }
    const changed = blocks.flatMap((block, k) =>
      String(block) === String(before.blocks[k]) ? [] : [[k, ...block]],
    );
    const changedCells = [...cells]
      .filter(([k, cell]) => JSON.stringify(cell) !== JSON.stringify(before.cells.get(k)))
      .map(([, cell]) => cell);
    const changedRows = [...rows.values()].flatMap((now) => {
      const then = before.rows.get(now.id);
      if (!then || gone.includes(now.id)) return [now];
      if (JSON.stringify(then) === JSON.stringify(now)) return [];
      const { text, ...rest } = now;
      return [{ ...rest, add: text.slice(then.text.length) }];
    });
    deltas.push(delta(changed, { ...shared, rows: changedRows, gone, cells: changedCells }));
  }
  return { fulls, deltas };
}

/** A frame of a pool in bins, which are `[used, kept, slot, flags]`, in a delta after their number. */
export function binned(kind, size, bins, more = {}) {
  const names = ["used", "kept", "slot", "flags"];
  const all = kind === "delta" ? ["i", ...names] : names;
  const lists = Object.fromEntries(all.map((name, k) => [name, bins.map((bin) => bin[k])]));
  const info = { ...INFO, num_blocks: size * bins.length };
  return kind === "delta"
    ? { ...delta([], more), bin: size, columns: lists }
    : { ...full([], { info, ...more }), bin: size, columns: lists };
}
