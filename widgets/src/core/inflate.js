// @ts-check
/**
 * JSON that Python has deflated (zlib).
 * @param {DataView | ArrayBuffer | Uint8Array<ArrayBuffer>} packed
 * @returns {Promise<any>}
 */
export async function inflate(packed) {
  const stream = new Blob([/** @type {BlobPart} */ (packed)])
    .stream()
    .pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}
