// @ts-check
/**
 * The prefix tree: shared beginnings once, with everybody who reads them.
 */
import { createChip, paintChip } from "./chip.js";
import { h, listen, setHidden, textNodes } from "./core/dom.js";
import { count, plural } from "./core/format.js";
import { placeTree, scaleMarks } from "./tree_layout.js";
import { runWords } from "./tree_words.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/link.js").Link} Link */
/** @typedef {import("./core/theme.js").Theme} Theme */
/** @typedef {import("./tree_layout.js").Placed} Placed */

const HINT = "Point at a run to see who reads it.";
const LEAST_ROW = 13;
const MOST_ROW = 34;
const LINE = 13;
const NAME_ROOM = 108;
const AXIS = 20;
/** Of 255, as hexadecimal: how much of the soft ink a tick has. */
const TICK = "8c";
/** Ticks closer than this are noise, px. */
const LEAST_TICK = 6;
/** Characters of a text; Python cuts a longer one. */
const LONGEST_TEXT = 96;

/**
 * @param {HTMLElement} root  an empty element
 * @param {Link} link
 */
export function createTree(root, link) {
  const stage = h("div", { class: "lms-tree-stage" });
  const frame = h(
    "div",
    {
      ...{ class: "lms-tree", tabindex: 0, role: "group" },
      "aria-label": "prefix tree; arrows move from run to run",
    },
    stage,
  );
  const empty = h("p", { class: "lms-void" }, "No prefixes yet.");
  const waiting = h("div", { class: "lms-tree-waiting" });
  const line = h("div", { class: "lms-readout lms-tree-line" });
  root.append(frame, empty, waiting, line);
  /** @type {(() => void)[]} */
  const cleanups = [];
  /** Elements by node id, so that a run stays the same one. @type {Map<number, HTMLElement>} */
  const runs = new Map();
  /** @type {Placed[]} */
  let placed = [];
  /** @type {Picture | null} */
  let picture = null;
  /** @type {number | null} */
  let pointed = null;
  /** @type {unknown} */
  let drawnTree = null;
  let drawnLook = "";

  /**
   * @param {Picture} next
   * @param {{theme: Theme, height: number}} look  `height` in px before it scrolls
   */
  function update(next, { theme, height }) {
    picture = next;
    const width = root.clientWidth;
    const look = [
      ...[width, height, theme.textSize, theme.colours.name, theme.colours.background],
      ...[link.lit, link.selected, next.info?.block_size],
      [...next.rows.values()].map((row) => row.slot),
    ].join();
    if (width && (next.tree !== drawnTree || look !== drawnLook)) {
      drawnTree = next.tree;
      drawnLook = look;
      draw(next, theme, width, height);
      drawWaiting(next, theme);
    }
    showLine();
  }

  /**
   * @param {Picture} shown
   * @param {Theme} theme
   * @param {number} width
   * @param {number} height
   */
  function draw(shown, theme, width, height) {
    const { tree, info } = shown;
    const plan = placeTree(tree);
    placed = plan.placed;
    setHidden(empty, plan.rows > 0);
    setHidden(frame, plan.rows === 0);
    const scale = theme.textSize / 12;
    const most = Math.floor((height - AXIS * scale) / Math.max(1, plan.rows));
    const row = Math.round(Math.max(LEAST_ROW * scale, Math.min(MOST_ROW * scale, most)));
    const room = Math.max(40, width - NAME_ROOM * scale - 14);
    const unit = room / Math.max(1, plan.blocks);
    const lines = Math.max(1, Math.floor((row - 3) / (LINE * scale)));
    stage.style.height = `${plan.rows * row + AXIS * scale}px`;
    stage.style.setProperty("--lms-tick", `${theme.colours.soft}${TICK}`);
    frame.style.maxHeight = `${height}px`;
    const known = new Set(placed.map(({ node }) => node.id));
    for (const [id, element] of runs) {
      if (known.has(id)) continue;
      element.remove();
      runs.delete(id);
    }
    const names = [];
    for (const place of placed) {
      const { node } = place;
      const element = runs.get(node.id) ?? h("div", { class: "lms-run", "data-node": node.id });
      if (!runs.has(node.id)) {
        runs.set(node.id, element);
        stage.append(element);
      }
      const x = Math.round(node.start * unit);
      const w = Math.max(3, Math.round((node.start + node.count) * unit) - x - 2);
      put(element, x, place.row * row, w, place.rows * row - 2);
      fill(element, place, shown, theme, { row, unit, lines, width: w });
      for (const id of place.ends) names.push(drawName(id, place, shown, theme, { row, x: x + w }));
    }
    for (const old of [...stage.querySelectorAll(":scope > .lms-tree-name, :scope > .lms-axis")])
      old.remove();
    const size = info?.block_size ?? 1;
    const marks = scaleMarks(plan.blocks * size, unit / size, 40 * scale);
    const axis = marks.map((token) => {
      const mark = h("span", { class: "lms-axis" }, token === 0 ? "token 0" : count(token));
      mark.style.left = `${Math.round((token / size) * unit)}px`;
      mark.style.top = `${plan.rows * row + 3}px`;
      return mark;
    });
    // What stands in the way of "token 0".
    if (marks.length > 1 && (marks[1] / size) * unit < 52 * scale) axis[1].remove();
    stage.append(...names, ...axis);
  }

  /**
   * Bands of the readers in their rows, ticks, what was hit, the text.
   * @param {HTMLElement} element
   * @param {Placed} place
   * @param {Picture} shown
   * @param {Theme} theme
   * @param {{row: number, unit: number, lines: number, width: number}} at
   */
  function fill(element, place, shown, theme, { row, unit, lines, width }) {
    const { node, bands } = place;
    const { colours } = theme;
    const hits = shown.tree.hits[node.id] ?? {};
    const ownerOf = (/** @type {string} */ id) =>
      colours.owner(shown.rows.get(id)?.slot ?? 254, id === link.lit ? id : undefined);
    const isKept = node.keptBy !== null;
    element.classList.toggle("lms-kept", isKept);
    element.classList.toggle(
      "lms-dim",
      link.lit !== null && !node.readers.includes(link.lit) && node.keptBy !== link.lit,
    );
    element.style.borderColor = isKept ? ownerOf(node.keptBy ?? "").edge : "";
    const parts = bands.map(([id, at]) => {
      const owner = ownerOf(id);
      const edge = h("i", { class: "lms-edge", "data-pattern": owner.pattern });
      edge.style.setProperty("--lms-edge", owner.edge);
      const band = h("i", { class: "lms-band" }, edge);
      put(band, 0, (at - place.row) * row, width, row - 2);
      band.style.background = owner.tint;
      if (hits[id]) {
        const hit = h("i", { class: "lms-hit" });
        hit.style.width = `${(100 * hits[id]) / node.count}%`;
        band.append(hit);
      }
      return band;
    });
    if (unit >= LEAST_TICK && node.count > 1) {
      const ticks = h("i", { class: "lms-ticks" });
      ticks.style.backgroundSize = `${unit}px 100%`;
      parts.push(ticks);
    }
    const rest = [...node.text].length >= LONGEST_TEXT ? "…" : "";
    const text = h("span", { class: "lms-run-text" }, ...textNodes(node.text.trim() + rest));
    // Each band gets whole lines, so none runs across the gap between two.
    text.style.lineHeight = `${row / lines}px`;
    text.style.setProperty(
      "-webkit-line-clamp",
      String(place.rows > 1 ? lines * place.rows : lines),
    );
    element.replaceChildren(...parts, text);
  }

  /**
   * The name of a reader behind the end of its text, with what it has just reused.
   * @param {string} id
   * @param {Placed} place
   * @param {Picture} shown
   * @param {Theme} theme
   * @param {{row: number, x: number}} at
   */
  function drawName(id, place, shown, theme, { row, x }) {
    const chip = createChip(id, link);
    const of = shown.rows.get(id);
    if (of) paintChip(chip, theme.colours, of, link);
    const blocks = Object.values(shown.tree.hits).reduce((sum, hits) => sum + (hits[id] ?? 0), 0);
    const reused = blocks * (shown.info?.block_size ?? 1);
    const words = reused ? h("span", { class: "lms-soft" }, ` reused ${count(reused)}`) : "";
    const name = h("span", { class: "lms-tree-name" }, chip, words);
    const at = place.bands.find(([reader]) => reader === id)?.[1] ?? place.row;
    name.style.left = `${x + 5}px`;
    name.style.top = `${at * row}px`;
    name.style.height = `${row - 2}px`;
    name.classList.toggle("lms-dim", link.lit !== null && link.lit !== id);
    return name;
  }

  /**
   * @param {Picture} shown
   * @param {Theme} theme
   */
  function drawWaiting(shown, theme) {
    const size = shown.info?.block_size ?? 1;
    setHidden(waiting, shown.tree.waiting.length === 0);
    waiting.replaceChildren(
      h("span", { class: "lms-soft" }, "waiting"),
      ...shown.tree.waiting.map(([id, node, blocks]) => {
        const chip = createChip(id, link);
        const of = shown.rows.get(id);
        if (of) paintChip(chip, theme.colours, of, link);
        chip.classList.add("lms-dashed");
        chip.addEventListener("pointerenter", () => point(node < 0 ? null : node));
        chip.addEventListener("pointerleave", () => point(null));
        const words = blocks ? `would reuse ${plural(blocks * size, "token")}` : "nothing to reuse";
        return h(
          "span",
          { class: "lms-tree-next" },
          chip,
          h("span", { class: "lms-soft" }, ` ${words}`),
        );
      }),
    );
  }

  /** @param {number | null} id */
  function point(id) {
    if (id === pointed) return;
    if (pointed !== null) runs.get(pointed)?.classList.remove("lms-pointed");
    pointed = id;
    if (pointed !== null) runs.get(pointed)?.classList.add("lms-pointed");
    const node = pointed === null ? null : picture?.tree.nodes.get(pointed);
    link.hover(node?.readers.length === 1 ? node.readers[0] : null);
    showLine();
  }

  function showLine() {
    const node = pointed === null ? undefined : picture?.tree.nodes.get(pointed);
    const parts = picture && node ? runWords(picture, node) : litWords();
    const key = parts.join("\n");
    if (line.dataset.key === key) return;
    line.dataset.key = key;
    line.replaceChildren(
      h("p", {}, h("b", {}, ...textNodes(parts[0])), " ", ...textNodes(parts[1])),
      h("p", { class: "lms-soft" }, ...textNodes(parts[2])),
    );
  }

  /** @returns {[string, string, string]} */
  function litWords() {
    const miss = link.lit === null ? undefined : picture?.misses[link.lit];
    if (miss && link.lit !== null) return [link.lit, miss, picture?.tree.note ?? ""];
    const misses = Object.entries(picture?.misses ?? {}).map(([id, words]) => `${id} ${words}`);
    return ["", misses.join(" · "), picture?.tree.note || (misses.length ? "" : HINT)];
  }

  /** @param {Event} event */
  function nodeAt(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const element = /** @type {HTMLElement | null} */ (target.closest?.("[data-node]"));
    return element ? Number(element.dataset.node) : null;
  }

  /** @param {number} id */
  function keep(id) {
    const node = picture?.tree.nodes.get(id);
    const owner = node?.readers[0] ?? node?.keptBy;
    if (owner) link.toggle(owner);
  }

  listen(cleanups, stage, "pointerover", (event) => {
    const id = nodeAt(event);
    if (id !== null) point(id);
  });
  listen(cleanups, stage, "pointerleave", () => point(null));
  listen(cleanups, stage, "click", (event) => {
    const id = nodeAt(event);
    if (id !== null) keep(id);
  });
  listen(cleanups, frame, "blur", () => point(null));
  listen(cleanups, frame, "keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target !== frame) return;
    const at = placed.findIndex(({ node }) => node.id === pointed);
    const isOn = event.key === "ArrowDown" || event.key === "ArrowRight";
    if (isOn || event.key === "ArrowUp" || event.key === "ArrowLeft") {
      event.preventDefault();
      const next = placed[Math.max(0, Math.min(placed.length - 1, at + (isOn ? 1 : -1)))];
      if (!next) return;
      point(next.node.id);
      runs.get(next.node.id)?.scrollIntoView?.({ block: "nearest" });
    } else if (event.key === "Enter" && pointed !== null) {
      event.preventDefault();
      keep(pointed);
    } else if (event.key === "Escape" && pointed !== null) {
      event.preventDefault();
      point(null);
    }
  });

  return {
    update,
    destroy() {
      for (const cleanup of cleanups) cleanup();
      runs.clear();
      root.replaceChildren();
    },
  };
}

/**
 * @param {HTMLElement} element
 * @param {number} x
 * @param {number} y
 * @param {number} w
 * @param {number} height
 */
function put(element, x, y, w, height) {
  const { style } = element;
  style.left = `${x}px`;
  style.top = `${y}px`;
  style.width = `${w}px`;
  style.height = `${Math.max(2, height)}px`;
}
