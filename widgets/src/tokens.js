// @ts-check
/**
 * Text as it arrives, token by token: the darker the ground, the more surprising the token was,
 * or the longer it took.
 */
import { createChip, paintChip } from "./chip.js";
import { h, icon, listen, setAttribute, setText, textNodes } from "./core/dom.js";
import { count, decimal, plural } from "./core/format.js";
import { ICONS } from "./icons.js";
import { order } from "./requests.js";
import { LEVELS, latencyEdges, levelOf } from "./token_levels.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/picture.js").Row} Row */
/** @typedef {import("./core/picture.js").Token} Token */
/** @typedef {import("./core/history.js").History} History */
/** @typedef {import("./core/link.js").Link} Link */
/** @typedef {"chance" | "latency"} Mode */
/** @typedef {{id: string, token: Token, place: number}} Pointed */

const MOST_LINES = 40;
/** Tokens shown of a request, and of the one that is chosen. */
const MOST_TOKENS = 96;
const MOST_CHOSEN = 512;
/** Characters that a frame carries of a prompt: one that long was cut. */
const PROMPT_TAIL = 120;
/** Characters of text from before the view began. */
const EARLIER = 400;
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
    empty.hidden = rows.length > 0;
    list.hidden = rows.length === 0;
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

/**
 * The text of one request.
 * @param {string} id
 * @param {Link} link
 */
function createLine(id, link) {
  /** @type {(() => void)[]} */
  const cleanups = [];
  const chip = createChip(id, link);
  const prompt = h("span", { class: "lms-prompt" });
  const earlier = h("span", { class: "lms-earlier" });
  const output = h("span", { class: "lms-output" });
  const end = h("span", { class: "lms-end", "aria-hidden": "true" });
  // Laid out from its end, a text that overflows shows its end and stays where a reader has
  // scrolled to, without asking for its size at every frame.
  const inner = h("div", {}, prompt, earlier, output, end);
  const text = h("div", { class: "lms-ttext", dir: "auto" }, inner);
  const element = h("div", { class: "lms-line", "data-request": id }, chip, text);
  listen(cleanups, element, "pointerenter", () => link.hover(id));
  listen(cleanups, element, "pointerleave", () => link.hover(null));
  /** @type {Token[]} */
  let tokens = [];
  /** Of each token its element. @type {HTMLElement[]} */
  const spans = [];
  /** Of each token how it looks, so that only what differs is written. @type {number[]} */
  const looks = [];
  /** Number of the first token drawn, so that a token keeps its number. */
  let base = 0;
  let shownPrompt = "";
  let shownEarlier = "";
  /** @type {number | null} */
  let marked = null;

  /** @param {Token[]} next */
  function setTokens(next) {
    const skipped = tokens.indexOf(next[0]);
    const kept = skipped < 0 ? tokens.length : skipped;
    for (const span of spans.splice(0, kept)) span.remove();
    looks.splice(0, kept);
    tokens = tokens.slice(kept);
    base += kept;
    let same = 0;
    while (same < tokens.length && tokens[same] === next[same]) same++;
    for (const span of spans.splice(same)) span.remove();
    looks.splice(same);
    for (let k = same; k < next.length; k++) {
      const span = drawToken(next[k], base + k);
      spans.push(span);
      output.append(span);
    }
    tokens = next;
  }

  return {
    ...{ id, element, chip },
    get length() {
      return tokens.length;
    },
    /** @param {number} place */
    token: (place) => tokens[place - base] ?? null,
    /** @returns {Pointed | null} */
    last() {
      const token = tokens.at(-1);
      return token ? { id, token, place: base + tokens.length - 1 } : null;
    },
    /**
     * @param {number} place
     * @param {boolean} is
     */
    mark(place, is) {
      marked = is ? place : null;
      delete looks[place - base];
      spans[place - base]?.classList.toggle("lms-pointed", is);
    },
    /** @param {number} place */
    reveal(place) {
      spans[place - base]?.scrollIntoView?.({ block: "nearest" });
    },
    /**
     * @param {Row} row
     * @param {{theme: import("./core/theme.js").Theme, picture: Picture, mode: Mode, edges: number[]}} look
     */
    update(row, { theme, picture, mode, edges }) {
      paintChip(chip, theme.colours, row, link);
      element.classList.toggle("lms-dim", link.lit !== null && link.lit !== id);
      element.classList.toggle("lms-chosen", link.selected === id);
      const promptText = endOfPrompt(row.prompt_text);
      if (promptText !== shownPrompt) {
        prompt.replaceChildren(...textNodes(promptText));
        shownPrompt = promptText;
      }
      const next = row.tokens.slice(-(link.selected === id ? MOST_CHOSEN : MOST_TOKENS));
      const length = next.reduce((sum, token) => sum + token.text.length, 0);
      const before = row.text.slice(0, Math.max(0, row.text.length - length));
      const earlierText = before.length > EARLIER ? `…${before.slice(-EARLIER)}` : before;
      prompt.hidden = before.length > EARLIER;
      if (earlierText !== shownEarlier) {
        earlier.replaceChildren(...textNodes(earlierText));
        shownEarlier = earlierText;
      }
      setTokens(next);
      for (let k = 0; k < next.length; k++) {
        const level = levelOf(next[k], mode, edges);
        const isNow = next[k].step === picture.step && picture.at >= 0;
        const look = level + (isNow ? 8 : 0) + (marked === base + k ? 16 : 0);
        if (looks[k] === look) continue;
        looks[k] = look;
        spans[k].className =
          `lms-token${isNow ? " lms-now" : ""}${marked === base + k ? " lms-pointed" : ""}`;
        spans[k].dataset.level = String(level);
      }
      const mark = row.state === "running" ? "caret" : row.state === "finished" ? "" : "cut";
      if (end.dataset.mark !== mark) {
        end.dataset.mark = mark;
        end.textContent = mark === "cut" ? " …" : "";
      }
    },
    destroy() {
      for (const cleanup of cleanups) cleanup();
      element.remove();
    },
  };
}

/**
 * A token on its ground, the space before it off it; before it what a preemption cost.
 * @param {Token} token
 * @param {number} place
 */
function drawToken(token, place) {
  const space = /^ +/.exec(token.text)?.[0] ?? "";
  const body = h("span", { class: "lms-t" }, ...textNodes(token.text.slice(space.length)));
  const stall = token.stall
    ? h("span", { class: "lms-stall" }, icon(ICONS.preempted), ` ${plural(token.stall, "step")} `)
    : null;
  return h("span", { class: "lms-token", "data-place": place }, space, stall, body);
}

/**
 * The tail of a prompt, from the first whole word on where one begins soon.
 * @param {string} tail
 */
export function endOfPrompt(tail) {
  if (tail.length < PROMPT_TAIL) return tail;
  const word = tail.search(/\s\S/);
  return `… ${word >= 0 && word < 24 ? tail.slice(word + 1) : tail}`;
}
