// @ts-check
/**
 * The binary part of a frame: one entry per block, or per changed block.
 */

/** @typedef {import("./picture.js").Frame} Frame */
/** @typedef {{i?: Uint32Array, slot: Uint8Array, state: Uint8Array, ref: Uint8Array, fill: Uint8Array}} Columns */

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
  const bytes = buffers.map((buffer) =>
    buffer instanceof ArrayBuffer
      ? new Uint8Array(buffer)
      : new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength),
  );
  const [slot, state, ref, fill] = isDelta ? bytes.slice(1) : bytes;
  if (!isDelta) return { slot, state, ref, fill };
  // A view into a message may start at any byte; a copy is aligned.
  return { i: new Uint32Array(bytes[0].slice().buffer), slot, state, ref, fill };
}

/**
 * The columns of a frame in a page: lists of numbers.
 * @param {Frame} frame
 * @returns {Columns}
 */
export function columnsFromLists(frame) {
  const lists = frame.columns ?? {};
  const column = (/** @type {string} */ name) => Uint8Array.from(lists[name] ?? []);
  return {
    i: frame.k === "delta" ? Uint32Array.from(lists.i ?? []) : undefined,
    ...{ slot: column("slot"), state: column("state"), ref: column("ref"), fill: column("fill") },
  };
}

/**
 * @param {Columns} columns
 * @param {number} size
 * @throws {Error} when a column has another length
 */
export function checkLengths(columns, size) {
  for (const name of /** @type {const} */ (["slot", "state", "ref", "fill"])) {
    if (columns[name].length !== size) {
      throw new Error(`column ${name} has ${columns[name].length} entries, not ${size}`);
    }
  }
}
