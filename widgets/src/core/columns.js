// @ts-check
/**
 * The binary part of a frame: one entry per block, or per changed block.
 */

/** @typedef {import("./picture.js").Frame} Frame */
/**
 * Of blocks: slot, state, ref, fill. Of bins, where the frame says `bin`: used, kept, slot, flags.
 * The others are empty.
 * @typedef {object} Columns
 * @property {Uint32Array} [i]  of a delta: which blocks, or bins
 * @property {Uint8Array} slot
 * @property {Uint8Array} state
 * @property {Uint8Array} ref
 * @property {Uint8Array} fill
 * @property {Uint16Array} used
 * @property {Uint16Array} kept
 * @property {Uint8Array} flags
 */

export const OF_BLOCKS = /** @type {const} */ (["slot", "state", "ref", "fill"]);
export const OF_BINS = /** @type {const} */ (["used", "kept", "slot", "flags"]);

const NO_BYTES = new Uint8Array(0);
const NOTHING = {
  ...{ slot: NO_BYTES, state: NO_BYTES, ref: NO_BYTES, fill: NO_BYTES, flags: NO_BYTES },
  ...{ used: new Uint16Array(0), kept: new Uint16Array(0) },
};

/**
 * The columns of a message: one buffer each, `i` first in a delta.
 * @param {Frame} frame
 * @param {(DataView | ArrayBuffer)[]} buffers
 * @returns {Columns}
 */
export function columnsFromBuffers(frame, buffers) {
  const isDelta = frame.k === "delta";
  const wanted = isDelta ? 5 : 4;
  if (buffers.length !== wanted) {
    throw new Error(`a ${frame.k} frame carries ${wanted} buffers, this one ${buffers.length}`);
  }
  // A view into a message may start at any byte; a copy is aligned.
  const bytes = buffers.map((buffer) =>
    buffer instanceof ArrayBuffer
      ? new Uint8Array(buffer)
      : new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength).slice(),
  );
  const i = isDelta ? { i: new Uint32Array(bytes[0].slice().buffer) } : {};
  const [first, second, third, fourth] = isDelta ? bytes.slice(1) : bytes;
  if (frame.bin) {
    const wide = (/** @type {Uint8Array} */ part) => new Uint16Array(part.slice().buffer);
    return { ...NOTHING, ...i, used: wide(first), kept: wide(second), slot: third, flags: fourth };
  }
  return { ...NOTHING, ...i, slot: first, state: second, ref: third, fill: fourth };
}

/**
 * The columns of a frame in a page: lists of numbers.
 * @param {Frame} frame
 * @returns {Columns}
 */
export function columnsFromLists(frame) {
  const lists = frame.columns ?? {};
  const column = (/** @type {string} */ name) => Uint8Array.from(lists[name] ?? []);
  const wide = (/** @type {string} */ name) => Uint16Array.from(lists[name] ?? []);
  const i = frame.k === "delta" ? { i: Uint32Array.from(lists.i ?? []) } : {};
  if (frame.bin)
    return {
      ...NOTHING,
      ...i,
      ...{ used: wide("used"), kept: wide("kept"), slot: column("slot"), flags: column("flags") },
    };
  return {
    ...NOTHING,
    ...i,
    ...{ slot: column("slot"), state: column("state"), ref: column("ref"), fill: column("fill") },
  };
}

/**
 * @param {Columns} columns
 * @param {readonly (typeof OF_BLOCKS[number] | typeof OF_BINS[number])[]} names
 * @param {number} size
 * @throws {Error} when a column has another length
 */
export function checkLengths(columns, names, size) {
  for (const name of names) {
    const { length } = columns[name];
    if (length !== size) throw new Error(`column ${name} has ${length} entries, not ${size}`);
  }
}
