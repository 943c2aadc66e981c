// @ts-check
/**
 * The pool in words: the title's numbers, the line under the map, the next blocks, a table.
 */
import { attentionWords, percent } from "./attention.js";
import { countBins, countBlocks } from "./block_describe.js";
import { h, setText, textNodes } from "./core/dom.js";
import { count, MISSING, visible } from "./core/format.js";
import { EMPTY, EVICTED, HIT, IN_USE, KEPT, NULL, WRITTEN } from "./core/picture.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/link.js").Link} Link */

const HINT = "Point at a block or a name; click to keep it lit.";
const TABLE_LIMIT = 1024;
const IDS_SHOWN = 24;

/**
 * What the pool holds, for the title of the map.
 * @param {Picture} picture
 */
export function summary(picture) {
  const { used, shared, kept, empty, hits, evicted } = picture.stat;
  const news = [hits && `${count(hits)} hit`, evicted && `${count(evicted)} evicted`].filter(
    Boolean,
  );
  return [
    `${count(used)} in use${shared ? `, ${count(shared)} shared` : ""}`,
    `${count(kept)} kept`,
    `${count(empty)} empty`,
    ...(news.length ? [`now ${news.join(", ")}`] : []),
  ].join(" · ");
}

/**
 * The fixed line under the map: the block pointed at, else the lit request, else a hint.
 * @param {HTMLElement} line
 * @param {Picture} picture
 * @param {number[]} blocks  those in the cell pointed at, none when there is none
 * @param {Link} link
 * @param {boolean} [canAsk]  whether single blocks of a pool in bins can be had
 */
export function readout(line, picture, blocks, link, canAsk = false) {
  const parts =
    blocks.length === 0
      ? requestLine(picture, link.lit)
      : blocks.length === 1
        ? blockLine(picture, blocks[0])
        : binLine(picture, blocks, canAsk);
  const key = parts.map((part) => part.join("")).join("\n");
  if (line.dataset.key === key) return;
  line.dataset.key = key;
  const [strong, plain, soft] = parts;
  line.replaceChildren(
    h("p", {}, h("b", {}, ...textNodes(strong.join(""))), " ", ...textNodes(plain.join(""))),
    h("p", { class: "lms-soft" }, ...textNodes(soft.join(""))),
  );
}

/**
 * Name, what it is, and more about it.
 * @param {Picture} picture
 * @param {number} block
 * @returns {[string[], string[], string[]]}
 */
function blockLine(picture, block) {
  const bits = picture.state[block];
  const cell = picture.cells.get(block);
  const place = picture.next.indexOf(block);
  const now = [
    bits & HIT ? "hit in this step" : "",
    bits & EVICTED ? `evicted in this step${cell?.[4] ? `, was ${cell[4]}` : ""}` : "",
    bits & WRITTEN ? "written in this step" : "",
  ];
  const more = [
    attentionWords(picture, block),
    ...now,
    place >= 0 ? `number ${place + 1} to be handed out` : "",
    cell?.[5] ? `hash ${cell[5].slice(0, 12)}` : "",
  ];
  const text = cell?.[2] ? ` · “${cell[2]}”` : "";
  return [
    [`block ${block}`],
    [`${stateWords(picture, block)}${text}`],
    [more.filter(Boolean).join(" · ")],
  ];
}

/**
 * @param {Picture} picture
 * @param {number[]} blocks
 * @param {boolean} canAsk  for single blocks
 * @returns {[string[], string[], string[]]}
 */
function binLine(picture, blocks, canAsk) {
  const from = blocks[0];
  const to = blocks[blocks.length - 1] + 1;
  const { bins, window } = picture;
  const isTold = window !== null && from >= window.first && to <= window.first + window.count;
  const { used, kept } =
    bins && !isTold ? countBins(bins, from, to) : countBlocks(picture, from, to);
  const empty = to - from - used - kept - (from === 0 ? 1 : 0);
  const states = [
    `${count(used)} in use, ${count(kept)} kept, ${count(empty)} empty`,
    attentionWords(picture, from, to),
  ]
    .filter(Boolean)
    .join(" · ");
  return [
    [`blocks ${count(blocks[0])} to ${count(blocks[blocks.length - 1])}`],
    [states],
    [
      bins
        ? canAsk
          ? "click, or Enter, to see single blocks; double click or Esc for all"
          : "a pool of this size is shown in bins"
        : "pinch, or click and turn the wheel, to see single blocks; double click for all",
    ],
  ];
}

/**
 * @param {Picture} picture
 * @param {number} block
 */
function stateWords(picture, block) {
  const state = picture.state[block] & 0xf;
  const owners = picture.ownersOf(block);
  const size = picture.info?.block_size ?? 0;
  const filled = `${picture.fill[block]} of ${size} tokens`;
  if (state === NULL) return "is the null block: never handed out";
  if (state === EMPTY) return "free and empty";
  if (state === KEPT)
    return `free, content kept${owners.length ? `, stored by ${owners[0]}` : ""} · ${filled}`;
  const names = owners.length ? ` by ${owners.join(", ")}` : "";
  const refs = picture.ref[block] > 1 ? `, ${picture.ref[block]} references` : "";
  return `in use${names}${refs} · ${filled}`;
}

/**
 * @param {Picture} picture
 * @param {string | null} id
 * @returns {[string[], string[], string[]]}
 */
function requestLine(picture, id) {
  const row = id === null ? undefined : picture.rows.get(id);
  if (!row) return [[""], [""], [HINT]];
  /** @type {number[]} */
  const held = [];
  for (const [block, cell] of picture.cells) {
    if ((picture.state[block] & 0xf) === IN_USE && cell[1].includes(row.id)) held.push(block);
  }
  held.sort((a, b) => a - b);
  const rest = held.length > IDS_SHOWN ? ` and ${held.length - IDS_SHOWN} more` : "";
  const blocks = held.length
    ? `in blocks ${held.slice(0, IDS_SHOWN).join(" ")}${rest}`
    : row.blocks
      ? `holds ${count(row.blocks)} blocks`
      : "holds no blocks";
  return [[row.id], [row.why], [blocks]];
}

/**
 * The free blocks that go out next, head first.
 * @param {HTMLElement} element
 * @param {Picture} picture
 * @param {import("./core/palette.js").Colours} colours
 * @param {string | null} lit
 */
export function drawNext(element, picture, colours, lit) {
  const free = picture.stat.kept + picture.stat.empty;
  const marks = picture.next.map((block) => {
    const isKept = (picture.state[block] & 0xf) === KEPT;
    const storer = picture.ownersOf(block)[0];
    const edge = isKept ? colours.owner(picture.slot[block]).edge : "";
    return { block, isKept, edge, isDim: lit !== null && storer !== lit };
  });
  const key = JSON.stringify([marks, free]);
  if (element.dataset.key === key) return;
  element.dataset.key = key;
  if (!marks.length) {
    const words = "none free: the next block needed costs a preemption";
    element.replaceChildren(
      h(
        "span",
        { class: picture.stat.used ? "lms-bad" : "lms-soft" },
        picture.stat.used ? words : "",
      ),
    );
    return;
  }
  const chips = marks.map(({ block, isKept, edge, isDim }) => {
    const chip = h(
      "span",
      { class: `lms-next-block${isKept ? " lms-kept" : ""}${isDim ? " lms-dim" : ""}` },
      block,
    );
    if (isKept) chip.style.borderColor = edge;
    return chip;
  });
  const rest = free - marks.length;
  element.replaceChildren(
    h("span", { class: "lms-soft" }, "next out"),
    ...chips,
    rest > 0 ? h("span", { class: "lms-soft" }, `+${count(rest)}`) : "",
  );
}

/**
 * The map as a table, for readers who do not see it.
 * @param {HTMLElement} element
 * @param {Picture} picture
 */
export function drawBlockTable(element, picture) {
  if (picture.bins) {
    drawBinTable(element, picture, picture.bins);
    return;
  }
  const { mass } = picture;
  const heads = ["block", "state", "requests", "references", "tokens", "text"];
  if (mass) heads.splice(5, 0, "attention");
  const names = ["empty", "in use", "kept", "null"];
  const rows = [];
  for (let block = 0; block < Math.min(picture.numBlocks, TABLE_LIMIT); block++) {
    const cell = picture.cells.get(block);
    const place = picture.next.indexOf(block);
    rows.push(
      h(
        "tr",
        {},
        h("td", {}, block),
        h(
          "td",
          {},
          `${names[picture.state[block] & 0xf]}${place >= 0 ? `, number ${place + 1} out` : ""}`,
        ),
        h("td", {}, visible(picture.ownersOf(block).join(" ")) || MISSING),
        h("td", {}, picture.ref[block] || MISSING),
        h("td", {}, picture.fill[block] || MISSING),
        ...(mass ? [h("td", {}, shareCell(picture, block))] : []),
        h("td", {}, ...textNodes(cell?.[2] ?? "")),
      ),
    );
  }
  const cut = picture.numBlocks - rows.length;
  const caption = h("caption", { class: "lms-soft" });
  setText(
    caption,
    cut > 0 ? `the first ${count(rows.length)} of ${count(picture.numBlocks)} blocks` : "",
  );
  element.replaceChildren(
    h(
      "table",
      {},
      caption,
      h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, ...rows),
    ),
  );
}

/**
 * @param {Picture} picture
 * @param {number} block
 * @param {number} [to]
 */
function shareCell(picture, block, to) {
  const level = picture.levelOf(block, to);
  return level ? percent(((picture.mass?.top ?? 0) * level) / 255) : MISSING;
}

/**
 * @param {HTMLElement} element
 * @param {Picture} picture
 * @param {import("./core/picture.js").Bins} bins
 */
function drawBinTable(element, picture, bins) {
  const heads = ["blocks", "in use", "kept"];
  if (picture.mass) heads.push("attention of a block");
  const rows = [];
  for (let bin = 0; bin < Math.min(bins.used.length, TABLE_LIMIT); bin++) {
    const from = bin * bins.size;
    const to = Math.min(picture.numBlocks, from + bins.size) - 1;
    const cells = [`${count(from)} to ${count(to)}`, count(bins.used[bin]), count(bins.kept[bin])];
    if (picture.mass) cells.push(shareCell(picture, from, to + 1));
    rows.push(h("tr", {}, ...cells.map((words) => h("td", {}, words))));
  }
  const head = h("tr", {}, ...heads.map((name) => h("th", { scope: "col" }, name)));
  element.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
}
