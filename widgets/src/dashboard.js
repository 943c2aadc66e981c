// @ts-check
/**
 * The whole view: header, steps, blocks, requests and legend, laid out for the room there is.
 */
import { createBanner } from "./banner.js";
import { createBlockMap } from "./block_map.js";
import { drawBlockTable, drawNext, summary } from "./block_words.js";
import { LONGEST_NAME } from "./chip.js";
import { h, listen, setText, textNodes } from "./core/dom.js";
import { count, plural } from "./core/format.js";
import { HELP, listenToKeys } from "./core/keys.js";
import { createLink } from "./core/link.js";
import { applyTheme, watchTheme } from "./core/theme.js";
import { createHeader } from "./header.js";
import { createLegend } from "./legend.js";
import { createRequests, order, requestSummary } from "./requests.js";
import { drawStepTable } from "./step_table.js";
import { createTexts } from "./texts.js";
import { createTimeline, stepSummary } from "./timeline.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/history.js").History} History */
/** @typedef {import("./core/palette.js").ThemeName} ThemeName */
/** @typedef {import("./core/theme.js").Theme} Theme */
/** @typedef {"wide" | "narrow" | "tiny"} Width */

/**
 * @typedef {object} Shown
 * @property {Picture} picture
 * @property {History} history
 * @property {number} cursor  entry of the history
 */

/**
 * @typedef {object} Options
 * @property {"auto" | ThemeName} [theme]
 * @property {string} [title]
 * @property {number} [height]     px before it scrolls, 0 for no limit
 * @property {string[]} [views]     "blocks", "requests"; none named: all of them
 * @property {boolean} [isLive]
 * @property {(theme: Theme) => void} [onTheme]  told at the start and after each change
 * @property {(entry: number) => void} [onSeek]
 * @property {(action: import("./core/keys.js").Action) => boolean} [onAction]
 */

/** Least widths in px at 12 px text. */
const WIDE = 1100;
const NARROW = 560;
/** From here on the table of requests has room for texts. */
const TEXT_IN_TABLE = 1400;
const MAP_HEIGHT = { wide: 292, narrow: 286, tiny: 240 };
const SMALLEST_TEXT = 11;
const LARGEST_TEXT = 18;
/** Rows from which on texts are kept short. */
const MANY_ROWS = 8;
const ANNOUNCE_MS = 1000;

/**
 * @param {number} width px
 * @param {number} textSize px
 * @returns {Width}
 */
export function widthClass(width, textSize) {
  const size = (width * 12) / textSize;
  return size >= WIDE ? "wide" : size >= NARROW ? "narrow" : "tiny";
}

/**
 * @param {HTMLElement} host  gets the dashboard as its child
 * @param {Options} [options]
 */
export function createDashboard(host, options = {}) {
  const { isLive = false, onSeek, onTheme = () => {}, onAction = () => false } = options;
  const link = createLink();
  /** @type {(() => void)[]} */
  const cleanups = [];
  const root = h("div", {
    ...{ class: "lms", tabindex: 0, role: "region", "aria-label": "lmscope" },
    // JupyterLab's shortcuts are single letters; this keeps them out.
    "data-lm-suppress-shortcuts": "true",
  });
  if (options.height) root.style.maxHeight = `${options.height}px`;
  const head = h("div", { class: "lms-head" });
  const banner = h("div", { class: "lms-banner", role: "status" });
  const time = panel("time", "Steps");
  const map = panel("map", "Blocks");
  const text = panel("text", "Text");
  const requests = panel("requests", "Requests");
  const next = h("div", { class: "lms-next" });
  const note = h("p", { class: "lms-soft lms-note" });
  const legend = h("div", { class: "lms-legend" });
  const live = h("div", { class: "lms-hidden", "aria-live": "polite" });
  const help = h("div", { class: "lms-help", hidden: true });
  root.append(
    head,
    banner,
    h("div", { class: "lms-grid" }, time.element, map.element, text.element, requests.element),
    legend,
    help,
    live,
  );
  host.append(root);
  requests.element.append(note);

  const views = {
    header: createHeader(head, { title: options.title }),
    banner: createBanner(banner),
    timeline: createTimeline(time.body, link, { onSeek }),
    map: createBlockMap(map.body, link, { redraw: schedule }),
    texts: createTexts(text.body, link),
    requests: createRequests(requests.body, link),
    legend: createLegend(legend),
  };
  map.body.querySelector("canvas")?.after(next);

  let choice = options.theme ?? "auto";
  let textSize = 12;
  /** @type {Theme} */
  let theme = applyTheme(root, choice, textSize);
  onTheme(theme);
  /** @type {Shown | null} */
  let shown = null;
  /** @type {(import("./core/picture.js").Tracker & {picture: Picture}) | null} */
  let tracker = null;
  /** @type {Width | ""} */
  let width = "";
  let isTables = false;
  let mustDrawAll = false;
  let wasConnected = root.isConnected;
  let say = "";
  let trouble = "";
  let isGone = false;
  /** @type {number | null} */
  let frame = null;
  /** @type {ReturnType<typeof setTimeout> | null} */
  let announcing = null;
  let announced = 0;

  function schedule() {
    if (frame !== null) return;
    frame = requestAnimationFrame(() => {
      frame = null;
      draw();
    });
  }

  /** @param {Picture} picture */
  function takeChanges(picture) {
    if (tracker?.picture !== picture) {
      tracker?.end();
      tracker = Object.assign(picture.track(), { picture });
    }
    return tracker.take();
  }

  /** Draws what has changed in the picture since the last time. */
  function draw() {
    if (!shown || !root.clientWidth) return;
    if (!wasConnected && root.isConnected) setColours();
    const { picture, history, cursor } = shown;
    const now = widthClass(root.clientWidth, textSize);
    // The texts stand beside the map where the table of requests has no room for them.
    const hasTexts =
      now === "narrow" || (now === "wide" && root.clientWidth * 12 < TEXT_IN_TABLE * textSize);
    if (now !== width || hasTexts !== (root.dataset.texts === "beside")) {
      width = now;
      root.dataset.width = now;
      root.dataset.texts = hasTexts ? "beside" : "inside";
      mustDrawAll = true;
    }
    const changes = takeChanges(picture);
    if (mustDrawAll) {
      changes.all = true;
      mustDrawAll = false;
    }
    if (changes.all || changes.list) fitNames(picture);
    const phase = isGone ? "dead" : picture.phase;
    const preempted = history.entries[cursor]?.preempted ?? [];
    const isTrouble = preempted.length > 0;
    const isNarrow = now !== "wide";
    views.header.update(picture, { phase, isTrouble, say });
    views.banner.update(picture, { phase, isGone, isLive });
    root.classList.toggle("lms-stale", phase === "dead");
    views.timeline.update(picture, { theme, history, cursor, isNarrow, isLive });
    views.map.update(picture, {
      theme,
      changes,
      height: Math.round((MAP_HEIGHT[now] * textSize) / 12),
    });
    if (hasTexts) views.texts.update(picture, { theme, changes });
    views.requests.update(picture, { theme, changes, preempted });
    drawNext(next, picture, theme.colours, link.lit);
    views.legend.update(history.occurred, theme);
    setText(time.sub, stepSummary(picture, history, cursor));
    setText(map.sub, summary(picture));
    setText(requests.sub, requestSummary(picture));
    showNote([picture.note, trouble].filter(Boolean).join(" · "));
    if (isTables) {
      drawBlockTable(map.table, picture);
      drawStepTable(time.table, history, cursor);
    }
    announce();
  }

  /** @param {Picture} picture */
  function fitNames(picture) {
    let longest = 2;
    for (const id of picture.rows.keys()) longest = Math.max(longest, id.length);
    root.style.setProperty(
      "--lms-name",
      `calc(${Math.min(longest, LONGEST_NAME)} * 0.56em + 15px)`,
    );
    root.classList.toggle("lms-many", picture.rows.size > MANY_ROWS);
  }

  /**
   * Shows the named panels in their order.
   * @param {string[]} names
   */
  function setViews(names) {
    const has = (/** @type {string} */ name) => names.length === 0 || names.includes(name);
    root.dataset.views = ["blocks", "requests"].filter(has).join(" ");
    map.element.style.order = String(names.indexOf("blocks") + 1);
    text.element.style.order = requests.element.style.order = String(names.indexOf("requests") + 1);
    mustDrawAll = true;
    schedule();
  }

  /** @param {string} words */
  function showNote(words) {
    if (note.dataset.words === words) return;
    note.dataset.words = words;
    note.hidden = words === "";
    note.replaceChildren(...textNodes(words));
  }

  /** Tells a screen reader where we are, at most once a second. */
  function announce() {
    if (announcing !== null) return;
    announcing = setTimeout(
      () => {
        announcing = null;
        announced = Date.now();
        if (!shown) return;
        const { picture } = shown;
        const { stat } = picture;
        const words = `step ${count(picture.step)}: ${count(stat.used)} of ${count(picture.numBlocks - 1)} blocks used, ${plural(stat.running + stat.waiting, "request")}, ${plural(stat.preemptions, "preemption")}`;
        setText(live, words);
      },
      Math.max(0, ANNOUNCE_MS - (Date.now() - announced)),
    );
  }

  function setColours() {
    wasConnected = root.isConnected;
    theme = applyTheme(root, choice, textSize);
    onTheme(theme);
    mustDrawAll = true;
  }

  function retheme() {
    setColours();
    schedule();
  }

  /** @param {number} by px */
  function resizeText(by) {
    textSize = Math.max(SMALLEST_TEXT, Math.min(LARGEST_TEXT, textSize + by));
    retheme();
    return true;
  }

  function toggleTables() {
    isTables = !isTables;
    root.classList.toggle("lms-tables", isTables);
    mustDrawAll = true;
    schedule();
    return true;
  }

  /** @param {1 | -1} direction */
  function nextRequest(direction) {
    if (!shown) return false;
    const ids = order(shown.picture).map((row) => row.id);
    if (!ids.length) return false;
    const at = link.selected === null ? -1 : ids.indexOf(link.selected);
    link.select(
      ids[
        at < 0 ? (direction > 0 ? 0 : ids.length - 1) : (at + direction + ids.length) % ids.length
      ],
    );
    return true;
  }

  function toggleHelp() {
    help.hidden = !help.hidden;
    return true;
  }

  /**
   * @param {import("./core/keys.js").Action} action
   * @returns {boolean}
   */
  function perform(action) {
    if (action === "tables") return toggleTables();
    if (action === "larger") return resizeText(1);
    if (action === "smaller") return resizeText(-1);
    if (action === "help") return toggleHelp();
    if (action === "request") return nextRequest(1);
    if (action === "request_back") return nextRequest(-1);
    if (action === "release") {
      if (!help.hidden) return toggleHelp();
      return link.release();
    }
    return onAction(action);
  }

  setViews(options.views ?? []);
  const helpButton = h(
    "button",
    { type: "button", class: "lms-button", title: "Keys  [?]", "aria-label": "Keys" },
    "?",
  );
  listen(cleanups, helpButton, "click", toggleHelp);
  views.header.controls.append(helpButton);
  const isOurs = (/** @type {string[]} */ actions) =>
    onSeek !== undefined || !actions.some((action) => ["back", "event", "first"].includes(action));
  help.append(
    ...HELP.filter(([, , actions]) => isOurs(actions)).flatMap(([keys, words]) => [
      h("kbd", {}, keys),
      h("span", {}, words),
    ]),
  );
  cleanups.push(listenToKeys(root, perform));
  cleanups.push(link.subscribe(schedule));
  cleanups.push(watchTheme(retheme));
  if (globalThis.ResizeObserver) {
    const observer = new ResizeObserver(schedule);
    observer.observe(root);
    cleanups.push(() => observer.disconnect());
  }

  return {
    root,
    link,
    views,
    /** Where a page or a widget puts its own buttons. */
    controls: views.header.controls,
    helpButton,
    perform,
    /** @param {Shown} next */
    update(next) {
      shown = next;
      draw();
    },
    redraw: schedule,
    /** @param {"auto" | ThemeName} next */
    setTheme(next) {
      choice = next;
      retheme();
    },
    setViews,
    /** @param {string} words  for the pill; "" for the name of the phase */
    setSay(words) {
      say = words;
      schedule();
    },
    /** @param {string} words  one soft line about what went wrong here */
    setTrouble(words) {
      trouble = words;
      schedule();
    },
    /** The kernel no longer answers: the picture stays, in grey. */
    setGone() {
      isGone = true;
      schedule();
    },
    destroy() {
      if (frame !== null) cancelAnimationFrame(frame);
      if (announcing !== null) clearTimeout(announcing);
      for (const cleanup of cleanups) cleanup();
      for (const view of Object.values(views)) view.destroy();
      tracker?.end();
      root.remove();
      shown = null;
    },
  };
}

/**
 * @param {string} name
 * @param {string} title
 */
function panel(name, title) {
  const sub = h("span", { class: "lms-sub" });
  const body = h("div", { class: "lms-body" });
  const table = h("div", { class: "lms-table" });
  const element = h(
    "section",
    { class: `lms-panel lms-p-${name}`, "aria-label": title },
    h("h2", {}, title, sub),
    body,
    table,
  );
  return { element, sub, body, table };
}
