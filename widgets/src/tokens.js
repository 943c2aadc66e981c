// @ts-check
/**
 * Text as it arrives, token by token: the darker the ground, the more surprising the token was,
 * or the longer it took.
 */
import { h, listen, setAttribute, setHidden, setText, textNodes } from "./core/dom.js";
import { count, decimal, plural } from "./core/format.js";
import { order } from "./requests.js";
import { LEVELS, latencyEdges } from "./token_levels.js";
import { createLine } from "./token_line.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/picture.js").Row} Row */
/** @typedef {import("./core/history.js").History} History */
/** @typedef {import("./core/link.js").Link} Link */
/** @typedef {import("./token_line.js").Mode} Mode */
/** @typedef {import("./token_line.js").Pointed} Pointed */

const MOST_LINES = 40;
const HINT = "Point at a token to see how it came about.";

/**
 * @param {HTMLElement} root  an empty element
 * @param {HTMLElement} corner  at the right of the title: the scale and its switch
 * @param {Link} link
 * @param {{redraw?: () => void, onSeek?: (entry: number) => void}} [options]
 */
export function createTokens(root, corner, link, { redraw = () => {}, onSeek } = {}) {
  const list = h("div", {
    class: "lms-toks",
    tabindex: 0,
    role: "group",
    "aria-label": "tokens; arrows move from one to the next",
  });
  const empty = h("p", { class: "lms-void" }, "No text yet.");
  const line = h("div", { class: "lms-readout lms-tok-line" });
  root.append(list, empty, line);
  const scale = createScale(corner, () => {
    mode = mode === "chance" ? "latency" : "chance";
    isChosen = true;
    redraw();
  });
  /** @type {(() => void)[]} */
  const cleanups = [];
  /** @type {Map<string, ReturnType<typeof createLine>>} */
  const lines = new Map();
  /** @type {Mode} */
  let mode = "latency";
  let isChosen = false;
  let drawnLook = "";
  /** @type {Pointed | null} */
  let pointed = null;
  /** @type {{picture: Picture, history: History} | null} */
  let shown = null;

  /**
   * @param {Picture} picture
   * @param {{theme: import("./core/theme.js").Theme, history: History,
   *   changes: import("./core/picture.js").Changes}} look
   */
  function update(picture, { theme, history, changes }) {
    shown = { picture, history };
    const rows = order(picture).slice(0, MOST_LINES);
    if (!isChosen && mode === "latency" && rows.some(hasChance)) mode = "chance";
    const edges = mode === "latency" ? latencyEdges(rows) : [];
    const look = [
      ...[theme.colours.name, theme.colours.background, link.lit, link.selected],
      ...[mode, edges, picture.step],
    ].join();
    const isNew = look !== drawnLook || changes.all || changes.list;
    drawnLook = look;
    setHidden(empty, rows.length > 0);
    setHidden(list, rows.length === 0);
    scale.update(mode, edges);
    if (!isNew && !changes.rows.size && !changes.all) return showLine();
    place(rows);
    for (const row of rows) {
      if (!isNew && !changes.rows.has(row.id)) continue;
      lines.get(row.id)?.update(row, { theme, picture, mode, edges });
    }
    showLine();
  }

  /** @param {Row[]} rows */
  function place(rows) {
    const wanted = new Set(rows.map((row) => row.id));
    for (const [id, line] of lines) {
      if (wanted.has(id)) continue;
      line.destroy();
      lines.delete(id);
    }
    rows.forEach((row, k) => {
      const line = lines.get(row.id) ?? createLine(row.id, link);
      lines.set(row.id, line);
      if (list.children[k] !== line.element)
        list.insertBefore(line.element, list.children[k] ?? null);
    });
  }

  /** @param {Pointed | null} next */
  function point(next) {
    if (next?.token === pointed?.token && next?.id === pointed?.id) return;
    if (pointed) lines.get(pointed.id)?.mark(pointed.place, false);
    pointed = next;
    if (pointed) lines.get(pointed.id)?.mark(pointed.place, true);
    link.hover(pointed?.id ?? null);
    showLine();
  }

  function showLine() {
    const parts = pointed && shown ? tokenWords(pointed, shown) : ["", "", HINT];
    const key = parts.join("\n");
    if (line.dataset.key === key) return;
    line.dataset.key = key;
    line.replaceChildren(
      h("p", {}, h("b", {}, ...textNodes(parts[0])), " ", ...textNodes(parts[1])),
      h("p", { class: "lms-soft" }, ...textNodes(parts[2])),
    );
  }

  /**
   * @param {Event} event
   * @returns {Pointed | null}
   */
  function tokenAt(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const element = /** @type {HTMLElement | null} */ (target.closest?.("[data-place]"));
    const owner = /** @type {HTMLElement | null} */ (target.closest?.("[data-request]"));
    if (!element || !owner) return null;
    const id = owner.dataset.request ?? "";
    const place = Number(element.dataset.place);
    const token = lines.get(id)?.token(place);
    return token ? { id, token, place } : null;
  }

  listen(cleanups, list, "pointerover", (event) => point(tokenAt(event)));
  listen(cleanups, list, "pointerleave", () => point(null));
  listen(cleanups, list, "click", (event) => {
    const found = tokenAt(event);
    if (found && !globalThis.getSelection?.()?.toString()) link.toggle(found.id);
  });
  listen(cleanups, list, "dblclick", (event) => {
    const found = tokenAt(event);
    if (found && shown) onSeek?.(Math.max(0, shown.history.entryOf(found.token.step)));
  });
  listen(cleanups, list, "blur", () => point(null));
  listen(cleanups, list, "keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target !== list) return;
    if (event.key === "Escape" && pointed) {
      event.preventDefault();
      point(null);
      return;
    }
    if (event.key === "Enter" && pointed) {
      event.preventDefault();
      link.toggle(pointed.id);
      return;
    }
    const next = move(event.key);
    if (!next) return;
    event.preventDefault();
    point(next);
    lines.get(next.id)?.reveal(next.place);
  });

  /**
   * Where an arrow leads: along a line, or to the end of the one above or below.
   * @param {string} key
   * @returns {Pointed | null}
   */
  function move(key) {
    const ids = [...lines.values()].filter((one) => one.length).map((one) => one.id);
    if (!ids.length || !key.startsWith("Arrow")) return null;
    const at = pointed ? ids.indexOf(pointed.id) : -1;
    if (!pointed || at < 0) return lines.get(ids[0])?.last() ?? null;
    if (key === "ArrowUp" || key === "ArrowDown") {
      const to = ids[at + (key === "ArrowDown" ? 1 : -1)];
      return to === undefined ? pointed : (lines.get(to)?.last() ?? null);
    }
    const place = pointed.place + (key === "ArrowRight" ? 1 : -1);
    const token = lines.get(pointed.id)?.token(place);
    return token ? { id: pointed.id, token, place } : pointed;
  }

  return {
    update,
    get mode() {
      return mode;
    },
    destroy() {
      for (const cleanup of cleanups) cleanup();
      for (const one of lines.values()) one.destroy();
      lines.clear();
      scale.destroy();
      root.replaceChildren();
    },
  };
}

/** @param {Row} row */
function hasChance(row) {
  return row.tokens.some((token) => token.chance !== null);
}

/**
 * Token, how it came about, and what could have stood in its place.
 * @param {Pointed} pointed
 * @param {{picture: Picture, history: History}} shown
 * @returns {[string, string, string]}
 */
function tokenWords({ id, token }, { history }) {
  const entry = history.entries[history.entryOf(token.step)];
  const stat = entry?.step === token.step ? entry.stat : null;
  const batch = stat ? `, a batch of ${plural(stat.scheduled, "token")}` : "";
  const facts = [
    `${id}, step ${count(token.step)}${batch}`,
    token.ms === null ? "" : `${decimal(token.ms, 1)} ms after the token before`,
    token.stall ? `${plural(token.stall, "step")} lost to a preemption` : "",
  ];
  const chance = token.chance === null ? "" : `probability ${share(token.chance)}`;
  const others = (token.others ?? []).map(([text, part]) => `“${text}” ${share(part)}`);
  const instead = others.length ? `instead: ${others.join(" · ")}` : "";
  return [
    `“${token.text}”`,
    facts.filter(Boolean).join(" · "),
    [chance, instead].filter(Boolean).join("; "),
  ];
}

/** @param {number} part */
function share(part) {
  return part > 0 && part < 0.001 ? "below 0.1 %" : `${decimal(part * 100, 1)} %`;
}

/**
 * The steps of the ground, with words at their ends and a switch between the two meanings.
 * @param {HTMLElement} corner
 * @param {() => void} toggle
 */
function createScale(corner, toggle) {
  const from = h("span");
  const to = h("span");
  const steps = LEVELS.map((level) => h("i", { class: "lms-level", "data-level": level }));
  const button = h(
    "button",
    { type: "button", class: "lms-button lms-scale", "aria-label": "colour of tokens" },
    ...[from, ...steps, to],
  );
  button.addEventListener("click", toggle);
  corner.append(button);
  return {
    /**
     * @param {Mode} mode
     * @param {number[]} edges
     */
    update(mode, edges) {
      const isChance = mode === "chance";
      setText(from, isChance ? "expected" : "quick");
      setText(to, isChance ? "surprise" : "slow");
      const words = isChance
        ? "Ground: probability above 0.9, 0.6, 0.3, 0.1, below. Click for latency."
        : `Ground: fifths of the time since the token before${edges.length ? `, ms: ${edges.map((edge) => decimal(edge, 1)).join(" ")}` : ""}. Click for probability.`;
      setAttribute(button, "title", words);
      setAttribute(button, "data-mode", mode);
    },
    destroy() {
      button.remove();
    },
  };
}
