// @ts-check
/**
 * Requests of a picture: what frames tell of them, put together.
 */

/** @typedef {import("./frames.js").Did} Did */
/** @typedef {import("./frames.js").Row} Row */
/** @typedef {import("./frames.js").SentRow} SentRow */
/** @typedef {import("./frames.js").SentToken} SentToken */
/** @typedef {import("./frames.js").Token} Token */

const TEXT_LIMIT = 4000;
const TOKEN_LIMIT = 512;
const NO_ROW = /** @type {Row} */ ({
  id: "",
  ...{ slot: 254, state: "waiting", why: "", prompt: 0, cached: 0, computed: 0, output: 0 },
  ...{ lost: 0, max: null, blocks: 0, shared: 0, preemptions: 0, arrived: 0, ended: null },
  ...{ waited: null, prompt_text: "", text: "", tokens: [], did: [] },
});

/**
 * @param {SentRow} row
 * @returns {Row}
 */
export function completeRow(row) {
  const { add, tokens = [], ...rest } = row;
  const text = rest.text ?? add ?? "";
  return { ...NO_ROW, ...rest, text: tail(text), tokens: cutTokens(text, tokens, []) };
}

/**
 * @param {Row} old
 * @param {SentRow} row
 * @param {number} step
 * @returns {Row}
 */
export function mergeRow(old, row, step) {
  const { add = "", tokens = [], ...rest } = row;
  if (rest.text !== undefined) return keepTokens(completeRow(row), old);
  const merged = { ...old, ...rest };
  if (add) merged.text = tail(old.text + add);
  if (add || tokens.length) merged.tokens = cutTokens(add, tokens, old.tokens);
  merged.did = mergeDid(old.did, rest, step);
  return merged;
}

/**
 * A row that was told anew, with the tokens before those told that are known already.
 * @param {Row} row
 * @param {Row | undefined} old
 * @returns {Row}
 */
export function keepTokens(row, old) {
  const first = row.tokens[0];
  if (!first || !old || old.arrived !== row.arrived) return row;
  const isFirst = (/** @type {Token} */ one) => one.step === first.step && one.text === first.text;
  const place = old.tokens.findLastIndex(isFirst);
  if (place <= 0) return row;
  const tokens = [...old.tokens.slice(0, place), ...row.tokens];
  const length = tokens.reduce((sum, { text }) => sum + text.length, 0);
  return length > row.text.length ? row : { ...row, tokens: tokens.slice(-TOKEN_LIMIT) };
}

/**
 * `before` and the tokens whose texts end `text`. What stands before them belongs to the token
 * before: it was held back until it could not become a stop string any more.
 * @param {string} text
 * @param {SentToken[]} sent
 * @param {Token[]} before
 * @returns {Token[]}
 */
function cutTokens(text, sent, before) {
  const made = before.slice();
  let start = Math.max(0, text.length - sent.reduce((sum, [length]) => sum + length, 0));
  const last = made.at(-1);
  if (start > 0 && last)
    made[made.length - 1] = { ...last, text: last.text + text.slice(0, start) };
  for (const [length, step, ms, chance = null, others = null, stall = 0] of sent) {
    made.push({ text: text.slice(start, start + length), step, ms, chance, others, stall });
    start += length;
  }
  return made.length > TOKEN_LIMIT ? made.slice(-TOKEN_LIMIT) : made;
}

/**
 * What a request did: told from some step on, or, when it is computing and nothing is told, the
 * same as before.
 * @param {Did[]} old
 * @param {SentRow} row
 * @param {number} step
 * @returns {Did[]}
 */
function mergeDid(old, { did, computed }, step) {
  if (did) return [...old.filter(([start]) => start < did[0][0]), ...did];
  const last = old.at(-1);
  if (computed === undefined || !last || last[2] === "x" || last[0] + last[1] > step) return old;
  const [start, , ...rest] = last;
  return [...old.slice(0, -1), [start, step - start + 1, ...rest]];
}

/**
 * The end of a text, never beginning with half a character.
 * @param {string} text
 */
function tail(text) {
  const end = text.slice(-TEXT_LIMIT);
  return /^[\udc00-\udfff]/.test(end) ? end.slice(1) : end;
}
