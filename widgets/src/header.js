// @ts-check
/**
 * The state of the run in one line: a pill, what it is, and the counts.
 */
import { h, icon, listen, setHidden, setText, textNodes } from "./core/dom.js";
import { count, decimal, percent } from "./core/format.js";
import { ICONS } from "./icons.js";

/** @typedef {import("./core/picture.js").Picture} Picture */

/** @type {Record<string, string>} */
const NAMES = {
  loading: "Loading",
  ready: "Ready",
  live: "Live",
  paused: "Paused",
  finished: "Finished",
  replay: "Replay",
  dead: "Disconnected",
};
/** @type {Record<string, string>} */
const SHAPES = {
  loading: ICONS.waiting,
  ready: ICONS.waiting,
  live: ICONS.running,
  paused: ICONS.pause,
  finished: ICONS.finished,
  replay: ICONS.play,
  dead: ICONS.waiting,
  back: ICONS.back,
};

/**
 * @param {HTMLElement} root  an empty element
 * @param {{title?: string, onReturn?: () => void}} [options]
 *   `onReturn` is for a click on the pill while an earlier step is looked at
 */
export function createHeader(root, { title = "", onReturn = () => {} } = {}) {
  const shape = h("span", { class: "lms-shape" });
  const words = h("span");
  const pill = h("button", { type: "button", class: "lms-pill", disabled: true }, shape, words);
  /** @type {(() => void)[]} */
  const cleanups = [];
  listen(cleanups, pill, "click", onReturn);
  const model = h("span", { class: "lms-soft lms-model" });
  const stats = h("div", { class: "lms-stats" });
  const controls = h("div", { class: "lms-controls" });
  root.append(h("div", { class: "lms-id" }, pill, model), stats, controls);
  const shown = STATS.map((stat) => {
    const value = h("b");
    const word = h("span");
    const element = h(
      "span",
      { class: `lms-stat${stat.wide ? " lms-wide-only" : ""}` },
      value,
      " ",
      word,
    );
    stats.append(element);
    return { ...stat, value, wordElement: word, element };
  });
  let drawnPhase = "";
  let drawnModel = "";

  return {
    controls,
    /**
     * @param {Picture} picture
     * @param {{phase: string, isTrouble?: boolean, say?: string, back?: string}} state
     *   `isTrouble` in a step that preempts; `say` replaces the name of the phase for a while,
     *   `back` as long as an earlier step is looked at
     */
    update(picture, { phase, isTrouble, say, back = "" }) {
      const look = back ? "back" : phase;
      if (look !== drawnPhase) {
        drawnPhase = look;
        pill.dataset.phase = look;
        pill.disabled = back === "";
        pill.title = back ? "return to the last step  [End]" : "";
        shape.replaceChildren(icon(SHAPES[look] ?? ICONS.waiting));
      }
      setText(words, say || back || NAMES[phase] || phase);
      const info = picture.info;
      const about = info
        ? [
            title || info.model,
            `${count(info.num_blocks)} blocks of ${count(info.block_size)} tokens`,
            `budget ${count(info.max_num_batched_tokens)}`,
            info.engine,
          ]
            .filter(Boolean)
            .join(" · ")
        : title;
      if (about !== drawnModel) {
        drawnModel = about;
        model.replaceChildren(...textNodes(about));
        model.title = about;
      }
      for (const stat of shown) {
        const value = stat.read(picture, phase);
        setHidden(stat.element, value === null);
        setText(stat.value, value ?? "");
        setText(stat.wordElement, stat.word(picture));
        stat.element.classList.toggle("lms-bad", Boolean(stat.isCostly && isTrouble));
      }
    },
    destroy() {
      for (const cleanup of cleanups) cleanup();
      root.replaceChildren();
    },
  };
}

/**
 * @typedef {object} StatText
 * @property {(picture: Picture, phase: string) => string | null} read  null hides it
 * @property {(picture: Picture) => string} word
 * @property {boolean} [wide]  left out where it is narrow
 * @property {boolean} [isCostly]  in the colour of trouble in a step that adds to it
 */

/** @type {StatText[]} */
const STATS = [
  {
    read: ({ stat, numBlocks }) => `${count(stat.used)}/${count(Math.max(0, numBlocks - 1))}`,
    word: () => "blocks used",
  },
  { read: ({ stat }) => count(stat.kept), word: () => "kept for reuse" },
  { read: ({ stat }) => count(stat.running), word: () => "running" },
  { read: ({ stat }) => count(stat.waiting), word: () => "waiting" },
  { read: ({ stat }) => percent(stat.cached_tokens, stat.prompt_tokens), word: () => "from cache" },
  {
    read: ({ stat }) => count(stat.preemptions),
    word: ({ stat }) => (stat.preemptions === 1 ? "preemption" : "preemptions"),
    isCostly: true,
  },
  {
    read: ({ stat }) => count(stat.evictions),
    word: ({ stat }) => (stat.evictions === 1 ? "eviction" : "evictions"),
  },
  {
    read: ({ stat }) => (stat.step_ms === null ? null : decimal(stat.step_ms, 1)),
    word: ({ stat: { device_ms: device } }) =>
      device === null ? "ms this step" : `ms this step, ${decimal(device, 1)} on the device`,
    wide: true,
  },
  {
    read: ({ stat }, phase) =>
      stat.tokens_per_s === null || phase !== "live" ? null : decimal(stat.tokens_per_s, 0),
    word: () => "tokens per second",
    wide: true,
  },
];
