// @ts-check
/**
 * Where the runs of the prefix tree go: to the right with the text, one row for each branch.
 * Pure numbers.
 */

/** @typedef {import("./core/picture.js").Tree} Tree */
/** @typedef {import("./core/picture.js").TreeNode} TreeNode */

/**
 * @typedef {object} Placed
 * @property {TreeNode} node
 * @property {number} row      first row
 * @property {number} rows
 * @property {[string, number][]} bands  its readers and their rows
 * @property {string[]} ends   readers whose text ends in it
 */

/**
 * @param {Tree} tree
 * @returns {{placed: Placed[], rows: number, blocks: number}}  `blocks`: the longest text
 */
export function placeTree({ nodes }) {
  /** @type {Map<number, TreeNode[]>} */
  const children = new Map();
  const ordered = [...nodes.values()].sort((a, b) => a.id - b.id);
  for (const node of ordered) {
    const parent = nodes.has(node.parent) ? node.parent : -1;
    children.set(parent, [...(children.get(parent) ?? []), node]);
  }
  /** @type {Placed[]} */
  const placed = [];
  let blocks = 0;

  /**
   * @param {TreeNode} node
   * @param {number} row
   * @returns {Map<string, number>} rows of its readers
   */
  function place(node, row) {
    const below = children.get(node.id) ?? [];
    const goOn = new Set(below.flatMap((child) => child.readers));
    const ends = node.readers.filter((id) => !goOn.has(id));
    /** @type {Placed} */
    const mine = { node, row, rows: ends.length, bands: [], ends };
    placed.push(mine);
    const rowOf = new Map(ends.map((id, k) => [id, row + k]));
    for (const child of below) {
      const first = placed.length;
      for (const [id, at] of place(child, row + mine.rows)) rowOf.set(id, at);
      mine.rows += placed[first].rows;
    }
    mine.rows = Math.max(1, mine.rows);
    mine.bands = node.readers.map((id) => [id, rowOf.get(id) ?? row]);
    blocks = Math.max(blocks, node.start + node.count);
    return rowOf;
  }

  let rows = 0;
  for (const root of children.get(-1) ?? []) {
    const first = placed.length;
    place(root, rows);
    rows += placed[first].rows;
  }
  return { placed, rows, blocks };
}

/**
 * Token numbers for the scale below, far enough from one another.
 * @param {number} tokens  in the longest text
 * @param {number} perToken  px
 * @param {number} spacing  px at least
 * @returns {number[]}
 */
export function scaleMarks(tokens, perToken, spacing) {
  let every = 1;
  for (const factor of stepsUp()) {
    every = factor;
    if (every * perToken >= spacing) break;
  }
  const marks = [];
  for (let token = 0; token <= tokens; token += every) marks.push(token);
  return marks;
}

function* stepsUp() {
  for (let ten = 1; ten < 1e9; ten *= 10) for (const digit of [1, 2, 4, 5]) yield digit * ten;
}
