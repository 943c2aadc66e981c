// @ts-check
/**
 * The text of one request in the token stream: the end of its prompt, then token by token.
 */
import { createChip, paintChip } from "./chip.js";
import { h, icon, listen, setAttribute, setHidden, textNodes } from "./core/dom.js";
import { plural } from "./core/format.js";
import { ICONS } from "./icons.js";
import { levelOf } from "./token_levels.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/picture.js").Row} Row */
/** @typedef {import("./core/picture.js").Token} Token */
/** @typedef {import("./core/link.js").Link} Link */
/** @typedef {"chance" | "latency"} Mode */
/** @typedef {{id: string, token: Token, place: number}} Pointed */

/** Tokens shown of a request, and of the one that is chosen. */
const MOST_TOKENS = 96;
const MOST_CHOSEN = 512;
/** More than that are let stand before the oldest become text, which moves all that follows. */
const SLACK = 32;
/** Characters that a frame carries of a prompt: one that long was cut. */
const PROMPT_TAIL = 120;
/** Characters of text from before the view began. */
const EARLIER = 400;

/**
 * The text of one request.
 * @param {string} id
 * @param {Link} link
 */
export function createLine(id, link) {
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

  /**
   * The last tokens of a row: those that are drawn and what has come since, at least `most`.
   * @param {Row} row
   * @param {number} most
   */
  function lastTokens(row, most) {
    const { length } = row.tokens;
    const from = tokens.length ? row.tokens.lastIndexOf(tokens[0]) : -1;
    const count = length - from;
    const mayStay = from >= 0 && count >= Math.min(most, length) && count <= most + SLACK;
    return mayStay ? row.tokens.slice(from) : row.tokens.slice(-most);
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
      const next = lastTokens(row, link.selected === id ? MOST_CHOSEN : MOST_TOKENS);
      const length = next.reduce((sum, token) => sum + token.text.length, 0);
      const before = row.text.slice(0, Math.max(0, row.text.length - length));
      const earlierText = before.length > EARLIER ? `…${before.slice(-EARLIER)}` : before;
      setHidden(prompt, before.length > EARLIER);
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
        setAttribute(spans[k], "data-level", String(level));
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
