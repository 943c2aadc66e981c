// @ts-check
/**
 * A line per request: why it runs or waits, how far it is, what it holds.
 */
import { createChip, paintChip } from "./chip.js";
import { h, icon, listen, setAttribute, setHidden, setText, textNodes } from "./core/dom.js";
import { count, MISSING, plural } from "./core/format.js";
import { ICONS } from "./icons.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/picture.js").Row} Row */
/** @typedef {import("./core/link.js").Link} Link */
/** @typedef {import("./core/theme.js").Theme} Theme */
/** @typedef {ReturnType<typeof createLine>} Line */

const MOST_LINES = 100;
const EXAMPLE = 'llm.generate("Why is the sky blue?")';
const RANK = { running: 0, preempted: 1, waiting: 1, finished: 2 };
const HEADS = ["", "why", "tokens", "blocks", "from cache", "▼", "waited"];

/**
 * @param {HTMLElement} root  an empty element
 * @param {Link} link
 * @param {{isLive?: boolean}} [options]  a live engine can be sent a request
 */
export function createRequests(root, link, { isLive = false } = {}) {
  const body = h("tbody");
  const heads = HEADS.map((head, k) => {
    const cell = h("th", { scope: "col", class: `lms-c${k}` });
    if (head !== "▼") cell.textContent = head;
    else cell.append(icon(ICONS.preempted), h("span", { class: "lms-hidden" }, "preemptions"));
    return cell;
  });
  const table = h("table", { class: "lms-requests" }, h("thead", {}, h("tr", {}, ...heads)), body);
  const rest = h("p", { class: "lms-soft lms-rest" });
  const empty = h(
    "div",
    {},
    h("p", { class: "lms-void" }, `No requests yet.${isLive ? " This sends one:" : ""}`),
    isLive && h("div", { class: "lms-code" }, EXAMPLE),
  );
  root.append(table, empty, rest);
  /** @type {Map<string, Line>} */
  const lines = new Map();
  let drawnLook = "";

  /**
   * @param {Picture} picture
   * @param {{theme: Theme, changes: import("./core/picture.js").Changes, preempted: string[]}} look
   *   `preempted` in this step: news, where an older preemption is not
   */
  function update(picture, { theme, changes, preempted }) {
    const look = [theme.colours.name, theme.colours.background, link.lit, link.selected].join();
    const isNew = look !== drawnLook || changes.all || changes.list;
    const rows = order(picture).slice(0, MOST_LINES);
    if (isNew || changes.rows.size) place(rows, picture);
    for (const row of rows) {
      const line = lines.get(row.id);
      const isNews = preempted.includes(row.id);
      if (isNew || changes.rows.has(row.id) || line?.isNews !== isNews) {
        line?.update(row, theme, link, isNews);
      }
    }
    drawnLook = look;
    setHidden(table, picture.rows.size === 0);
    setHidden(empty, picture.rows.size > 0);
    const more = picture.rows.size - MOST_LINES;
    setText(rest, more > 0 ? `and ${plural(more, "more request")}` : "");
  }

  /**
   * Puts lines in order; moves none that stands right.
   * @param {Row[]} rows
   * @param {Picture} picture
   */
  function place(rows, picture) {
    const shown = new Set(rows.map((row) => row.id));
    for (const [id, line] of lines) {
      if (shown.has(id) && picture.rows.has(id)) continue;
      line.destroy();
      lines.delete(id);
    }
    rows.forEach((row, k) => {
      let line = lines.get(row.id);
      if (!line) {
        line = createLine(row.id, link);
        lines.set(row.id, line);
      }
      if (body.children[k] !== line.element)
        body.insertBefore(line.element, body.children[k] ?? null);
    });
  }

  return {
    update,
    destroy() {
      for (const line of lines.values()) line.destroy();
      lines.clear();
      root.replaceChildren();
    },
  };
}

/**
 * Running requests as they came, then those that wait, then the finished, the latest first.
 * @param {Picture} picture
 * @returns {Row[]}
 */
export function order(picture) {
  return [...picture.rows.values()].sort(
    (a, b) =>
      RANK[a.state] - RANK[b.state] ||
      (a.state === "finished" ? (b.ended ?? 0) - (a.ended ?? 0) : a.arrived - b.arrived),
  );
}

/**
 * Numbers of requests, for the title of the panel.
 * @param {Picture} picture
 */
export function requestSummary(picture) {
  const { running, waiting, finished } = picture.stat;
  return `${count(running)} running, ${count(waiting)} waiting, ${count(finished)} finished`;
}

/**
 * @param {string} id
 * @param {Link} link
 */
function createLine(id, link) {
  /** @type {(() => void)[]} */
  const cleanups = [];
  const chip = createChip(id, link);
  const mark = h("span", { class: "lms-mark" });
  const why = h("span", { class: "lms-sentence" });
  const bar = createBar();
  const cells = [
    h("td", { class: "lms-c0" }, chip),
    h("td", { class: "lms-c1" }, mark, why),
    h("td", { class: "lms-c2" }, bar.element),
    ...[3, 4, 5, 6].map((k) => h("td", { class: `lms-c${k}` })),
  ];
  const element = h("tr", {}, ...cells);
  element.dataset.id = id;
  listen(cleanups, element, "pointerenter", () => link.hover(id));
  listen(cleanups, element, "pointerleave", () => link.hover(null));
  listen(cleanups, element, "click", () => {
    // Selecting text is not choosing a request.
    if (!globalThis.getSelection?.()?.toString()) link.toggle(id);
  });
  let shownState = "";
  let shownWhy = "";
  let shownNews = false;

  return {
    element,
    get isNews() {
      return shownNews;
    },
    /**
     * @param {Row} row
     * @param {Theme} theme
     * @param {Link} from
     * @param {boolean} isNews  preempted in this step
     */
    update(row, theme, from, isNews) {
      shownNews = isNews;
      paintChip(chip, theme.colours, row, from);
      const state = isNews ? "preempted" : row.state === "preempted" ? "waiting" : row.state;
      if (state !== shownState) {
        shownState = state;
        element.dataset.state = state;
        mark.replaceChildren(icon(ICONS[state]));
        setAttribute(mark, "title", state);
      }
      if (row.why !== shownWhy) {
        shownWhy = row.why;
        why.replaceChildren(...textNodes(row.why));
      }
      bar.update(row, theme.colours.owner(row.slot, from.lit === row.id ? row.id : undefined));
      setText(
        cells[3],
        row.blocks ? `${count(row.blocks)}${row.shared ? ` (${count(row.shared)})` : ""}` : MISSING,
      );
      setText(cells[4], row.cached ? count(row.cached) : MISSING);
      setText(cells[5], row.preemptions ? count(row.preemptions) : MISSING);
      cells[5].classList.toggle("lms-bad", isNews);
      element.classList.toggle("lms-lit", from.lit === row.id);
      element.classList.toggle("lms-dim", from.lit !== null && from.lit !== row.id);
      setText(cells[6], row.waited ? count(row.waited) : MISSING);
    },
    destroy() {
      for (const cleanup of cleanups) cleanup();
      element.remove();
    },
  };
}

/** A bar on a line with a tick: cached hollow, computed in hue, given up hatched, prompt's end. */
function createBar() {
  const done = h("i", { class: "lms-bar-done" });
  const cached = h("i", { class: "lms-bar-cached" });
  const lost = h("i", { class: "lms-bar-lost" });
  const tick = h("i", { class: "lms-bar-tick" });
  const element = h("div", { class: "lms-bar" }, lost, done, cached, tick);
  let shown = "";
  return {
    element,
    /**
     * @param {Row} row
     * @param {import("./core/palette.js").Owner} owner
     */
    update(row, owner) {
      const total = Math.max(1, row.prompt + (row.max ?? Math.max(16, row.output)), row.computed);
      const isGivenUp = row.computed === 0 && row.lost > 0 && row.state !== "finished";
      const key = [
        total,
        row.computed,
        row.cached,
        row.lost,
        row.prompt,
        isGivenUp,
        owner.hue,
      ].join();
      if (key === shown) return;
      shown = key;
      const share = (/** @type {number} */ tokens) => `${(100 * Math.min(tokens, total)) / total}%`;
      done.style.width = share(row.computed);
      done.style.background = owner.hue;
      done.style.boxShadow = owner.edge === owner.hue ? "" : `0 1px ${owner.edge}`;
      cached.style.width = share(Math.min(row.cached, row.computed));
      cached.style.borderColor = owner.edge;
      setHidden(cached, !row.cached || !row.computed);
      lost.style.width = share(row.lost);
      setHidden(lost, !isGivenUp);
      tick.style.left = share(row.prompt);
      element.title = `${count(row.computed)} of ${count(row.prompt)} prompt and ${count(row.output)} output tokens computed`;
    },
  };
}
