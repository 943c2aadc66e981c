// @ts-check
/**
 * How dark the ground of a token is: five steps of surprise, or fifths of the time it took.
 */
import palette from "../lmscope_widgets/palette.json" with { type: "json" };

/** @typedef {import("./core/picture.js").Row} Row */
/** @typedef {import("./core/picture.js").Token} Token */

export const LEVELS = [0, 1, 2, 3, 4];
/** Tokens below which fifths say nothing. */
const LEAST = 5;

/**
 * @param {Token} token
 * @param {"chance" | "latency"} mode
 * @param {number[]} edges  of the fifths, in ms
 * @returns {number} 0 to 4
 */
export function levelOf(token, mode, edges) {
  if (mode === "chance") {
    const { chance } = token;
    if (chance === null) return 0;
    const level = palette.surprise.edges.findIndex((edge) => chance > edge);
    return level < 0 ? LEVELS.length - 1 : level;
  }
  const { ms } = token;
  return ms === null ? 0 : edges.filter((edge) => ms > edge).length;
}

/**
 * The four times between the fifths of what is shown, in ms; none when there is too little.
 * @param {Row[]} rows
 * @returns {number[]}
 */
export function latencyEdges(rows) {
  const times = [];
  // The first token waits for its prompt, and would hide the differences among the others.
  for (const row of rows)
    for (let k = 1; k < row.tokens.length; k++) times.push(row.tokens[k].ms ?? Number.NaN);
  const known = times.filter(Number.isFinite).sort((a, b) => a - b);
  if (known.length < LEAST || known[0] === known[known.length - 1]) return [];
  return [1, 2, 3, 4].map((fifth) => known[Math.ceil((fifth * known.length) / 5) - 1]);
}
