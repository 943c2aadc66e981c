// @ts-check
/**
 * The whole view: header, panels and legend, laid out for the room there is.
 */
import { NOTHING } from "./actions.js";
import { createColourSwitch } from "./attention.js";
import { createBanner } from "./banner.js";
import { createBlockMap } from "./block_map.js";
import { drawBlockTable, drawNext, summary } from "./block_words.js";
import { LONGEST_NAME } from "./chip.js";
import { h, listen, setText, textNodes } from "./core/dom.js";
import { count, plural } from "./core/format.js";
import { HELP, listenToKeys } from "./core/keys.js";
import { createLink } from "./core/link.js";
import { applyTheme, watchTheme } from "./core/theme.js";
import { createDebugger } from "./debugger.js";
import { createHeader } from "./header.js";
import { createLegend } from "./legend.js";
import { createPanels } from "./panels.js";
import { createRequests, order, requestSummary } from "./requests.js";
import { drawStepTable } from "./step_table.js";
import { createTimeline, stepSummary } from "./timeline.js";
import { createTokens } from "./tokens.js";
import { createTree } from "./tree.js";
import { drawTreeTable, treeSummary } from "./tree_words.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/history.js").History} History */
/** @typedef {import("./core/palette.js").ThemeName} ThemeName */
/** @typedef {import("./core/theme.js").Theme} Theme */
/** @typedef {import("./panels.js").Width} Width */

/**
 * @typedef {object} Shown
 * @property {Picture} picture
 * @property {History} history
 * @property {number} cursor  entry of the history
 * @property {string} [back]  the pill's words while an earlier step is looked at
 */

/**
 * @typedef {object} Options
 * @property {"auto" | ThemeName} [theme]
 * @property {string} [title]
 * @property {number} [height]     px before it scrolls, 0 for no limit
 * @property {string[]} [views]     names as in panels.js; none named: all of them
 * @property {import("./attention.js").ColourBy} [colour]  of blocks, at first
 * @property {boolean} [isLive]
 * @property {(theme: Theme) => void} [onTheme]  told at the start and after each change
 * @property {(entry: number) => void} [onSeek]
 * @property {import("./actions.js").Actions} [actions]
 * @property {() => void} [onReturn]  from looking back
 * @property {(window: {first: number, count: number} | null) => void} [askWindow]  as in block_map.js
 */

/** Least widths in px at 12 px text. */
const WIDE = 1100;
const NARROW = 560;
const MAP_HEIGHT = { wide: 292, narrow: 286, tiny: 240 };
const SMALLEST_TEXT = 11;
const LARGEST_TEXT = 18;
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
  const { isLive = false, onSeek, onTheme = () => {}, actions = NOTHING } = options;
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
  const layout = createPanels(() => {
    mustDrawAll = true;
    schedule();
  });
  const { timeline: time, blocks: map, tree, tokens, requests, debugger: dbg } = layout.panels;
  const next = h("div", { class: "lms-next" });
  const note = h("p", { class: "lms-soft lms-note" });
  const legend = h("div", { class: "lms-legend" });
  const live = h("div", { class: "lms-hidden", "aria-live": "polite" });
  const help = h("div", { class: "lms-help", hidden: true });
  root.append(head, banner, layout.grid, legend, help, live);
  host.append(root);
  requests.element.append(note);

  const views = {
    header: createHeader(head, { title: options.title, onReturn: options.onReturn }),
    banner: createBanner(banner),
    timeline: createTimeline(time.body, link, { onSeek }),
    map: createBlockMap(map.body, link, { redraw: schedule, isLive, askWindow: options.askWindow }),
    tree: createTree(tree.body, link),
    tokens: createTokens(tokens.body, tokens.corner, link, { redraw: schedule, onSeek }),
    requests: createRequests(requests.body, link, { isLive }),
    debugger: createDebugger(dbg.body, actions),
    legend: createLegend(legend),
    colour: createColourSwitch(map.corner, () => toggleColour()),
  };
  map.body.querySelector("canvas")?.after(next);

  let colour = options.colour ?? "owner";
  /** Whether blocks have ever had another colour than their owner's. */
  let hasColours = false;
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
  let drawnPhase = "";
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
    if (!shown) return;
    const { clientWidth } = root;
    if (!clientWidth) return;
    if (!wasConnected && root.isConnected) setColours();
    const { picture, history, cursor, back = "" } = shown;
    const now = widthClass(clientWidth, textSize);
    const phase = isGone ? "dead" : picture.phase;
    // Where there are tabs, a breakpoint opens the one that says where the engine stands.
    if (phase === "paused" && drawnPhase === "live" && picture.breaks.length)
      mustDrawAll = layout.open("debugger") || mustDrawAll;
    drawnPhase = phase;
    if (now !== width) {
      width = now;
      root.dataset.width = now;
      mustDrawAll = true;
    }
    if (mustDrawAll) layout.place(width);
    const changes = takeChanges(picture);
    if (mustDrawAll) {
      changes.all = true;
      mustDrawAll = false;
    }
    if (changes.all || changes.list) fitNames(picture);
    const preempted = history.entries[cursor]?.preempted ?? [];
    const isTrouble = preempted.length > 0;
    const isNarrow = now !== "wide";
    const height = Math.round((MAP_HEIGHT[now] * textSize) / 12);
    // First those that ask for their width: after a change the browser has to lay out for it.
    if (layout.isShown("blocks")) views.map.update(picture, { theme, changes, height, colour });
    if (layout.isShown("tree")) views.tree.update(picture, { theme, height });
    if (layout.isShown("timeline"))
      views.timeline.update(picture, { theme, history, cursor, isNarrow, isLive });
    if (layout.isShown("blocks")) {
      hasColours ||= picture.mass !== null || colour === "attention";
      views.colour.update(colour, hasColours);
      drawNext(next, picture, theme.colours, link.lit);
    }
    views.header.update(picture, { phase, isTrouble, say, back });
    views.banner.update(picture, { phase, isGone, isLive });
    root.classList.toggle("lms-stale", phase === "dead");
    if (layout.isShown("tokens")) views.tokens.update(picture, { theme, history, changes });
    if (layout.isShown("requests")) views.requests.update(picture, { theme, changes, preempted });
    if (layout.isShown("debugger"))
      views.debugger.update(picture, phase, isLive && phase === "live" && !back);
    const attention = colour === "attention" ? { top: picture.mass?.top ?? 0 } : null;
    views.legend.update(history.occurred, theme, layout.shown, attention);
    setText(time.sub, stepSummary(picture, history, cursor));
    setText(map.sub, summary(picture));
    setText(tree.sub, treeSummary(picture));
    setText(requests.sub, requestSummary(picture));
    showNote([picture.note, trouble].filter(Boolean).join(" · "));
    if (isTables) {
      drawBlockTable(map.table, picture);
      drawTreeTable(tree.table, picture);
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
  }

  /**
   * Shows the named views in their order.
   * @param {string[]} names
   */
  function setViews(names) {
    layout.choose(names);
    root.dataset.views = layout.shown.join(" ");
    mustDrawAll = true;
    if (width) layout.place(width);
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

  /** @param {import("./attention.js").ColourBy} next */
  function setColour(next) {
    colour = next;
    schedule();
  }

  function toggleColour() {
    if (!hasColours) return false;
    setColour(colour === "owner" ? "attention" : "owner");
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
    root.classList.toggle("lms-helping", !help.hidden);
    return true;
  }

  /**
   * @param {import("./core/keys.js").Action} action
   * @returns {boolean}
   */
  function perform(action) {
    if (action === "tables") return toggleTables();
    if (action === "colour") return toggleColour();
    if (action === "larger") return resizeText(1);
    if (action === "smaller") return resizeText(-1);
    if (action === "help") return toggleHelp();
    if (action === "request") return nextRequest(1);
    if (action === "request_back") return nextRequest(-1);
    if (action === "release") {
      if (!help.hidden) return toggleHelp();
      return link.release();
    }
    return actions.perform(action);
  }

  setViews(options.views ?? []);
  const helpButton = h(
    "button",
    { type: "button", class: "lms-button", title: "Keys  [?]", "aria-label": "Keys" },
    "?",
  );
  listen(cleanups, helpButton, "click", toggleHelp);
  views.header.controls.append(helpButton);
  const isOurs = (/** @type {string[]} */ names) =>
    (onSeek || !names.some((name) => ["back", "event", "first"].includes(name))) &&
    (actions.can("break") || !names.includes("break"));
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
    setColour,
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
      layout.destroy();
      tracker?.end();
      root.remove();
      shown = null;
    },
  };
}
