// @ts-check
/**
 * The prefix tree in words: the line about a run, the title's numbers, a table.
 */
import { h, textNodes } from "./core/dom.js";
import { count, MISSING, plural, visible } from "./core/format.js";
import { placeTree } from "./tree_layout.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/picture.js").TreeNode} TreeNode */

const TABLE_LIMIT = 200;

/**
 * @param {Picture} picture
 * @param {TreeNode} node
 * @returns {[string, string, string]}
 */
export function runWords(picture, node) {
  const size = picture.info?.block_size ?? 1;
  const from = node.start * size;
  const hits = Object.entries(picture.tree.hits[node.id] ?? {});
  const who =
    node.keptBy === null
      ? `read by ${node.readers.join(", ")}`
      : `kept, no reader${node.keptBy ? `, stored by ${node.keptBy}` : ""}`;
  const now = hits.map(([id, blocks]) => `${plural(blocks, "block")} hit in this step by ${id}`);
  const misses = node.readers
    .filter((id) => picture.misses[id])
    .map((id) => `${id} ${picture.misses[id]}`);
  return [
    `tokens ${count(from)} to ${count(from + node.count * size - 1)}`,
    `${plural(node.count, "block")}, ${who} · “${node.text}”`,
    [...now, ...misses].join(" · "),
  ];
}

/**
 * The tree as a table, for readers who do not see it.
 * @param {HTMLElement} element
 * @param {Picture} picture
 */
export function drawTreeTable(element, picture) {
  const heads = ["from token", "blocks", "depth", "read by", "text"];
  const { nodes } = picture.tree;
  const size = picture.info?.block_size ?? 1;
  const depth = (/** @type {TreeNode | undefined} */ node) => {
    let steps = 0;
    for (let at = node; at && nodes.has(at.parent); at = nodes.get(at.parent)) steps++;
    return steps;
  };
  const rows = placeTree(picture.tree).placed.slice(0, TABLE_LIMIT);
  const body = rows.map(({ node }) => {
    const who = node.readers.join(" ") || `kept${node.keptBy ? `, stored by ${node.keptBy}` : ""}`;
    const cells = [count(node.start * size), count(node.count), count(depth(node))];
    return h(
      "tr",
      {},
      ...cells.map((value) => h("td", {}, value)),
      h("td", {}, visible(who) || MISSING),
      h("td", {}, ...textNodes(node.text)),
    );
  });
  const head = h("tr", {}, ...heads.map((name) => h("th", { scope: "col" }, name)));
  element.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, ...body)));
}

/**
 * The tree in numbers, for the title.
 * @param {Picture} picture
 */
export function treeSummary(picture) {
  const nodes = [...picture.tree.nodes.values()];
  const shared = nodes.filter((node) => node.readers.length > 1);
  const kept = nodes.filter((node) => node.keptBy !== null);
  const blocks = (/** @type {TreeNode[]} */ some) =>
    some.reduce((sum, node) => sum + node.count, 0);
  return [
    "width: tokens, height: branches",
    shared.length ? `${plural(blocks(shared), "block")} shared` : "",
    kept.length ? "dashed: kept, no reader" : "",
  ]
    .filter(Boolean)
    .join(" · ");
}
