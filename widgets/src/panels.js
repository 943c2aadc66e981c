// @ts-check
/**
 * The panels of the views, and where they stand: in rows of 24 columns, or three of them behind
 * tabs where there is no room.
 */
import { h, listen, setAttribute } from "./core/dom.js";

/** @typedef {"timeline" | "blocks" | "tree" | "tokens" | "requests" | "debugger"} ViewName */
/** @typedef {"wide" | "narrow" | "tiny"} Width */
/** @typedef {ReturnType<typeof createPanel>} Panel */

/** All views in their order. @type {ViewName[]} */
export const VIEWS = ["timeline", "blocks", "tree", "tokens", "requests", "debugger"];
/** Views that share one place where it is narrow, in the order of their tabs. @type {ViewName[]} */
const TABBED = ["tokens", "tree", "debugger"];
const COLUMNS = 24;
/** @type {Record<ViewName, number>} */
const SPANS = { timeline: 24, blocks: 9, tree: 8, tokens: 7, requests: 15, debugger: 9 };
/** @type {Record<ViewName, number>} */
const NARROW = { timeline: 24, blocks: 11, tree: 13, tokens: 13, requests: 24, debugger: 13 };
/** @type {Record<ViewName, [string, string]>} */
const NAMES = {
  timeline: ["time", "Steps"],
  blocks: ["map", "Blocks"],
  tree: ["tree", "Prefix tree"],
  tokens: ["tok", "Tokens"],
  requests: ["requests", "Requests"],
  debugger: ["dbg", "Debugger"],
};

/** @param {() => void} changed  another tab is open */
export function createPanels(changed) {
  const panels = /** @type {Record<ViewName, Panel>} */ (
    Object.fromEntries(VIEWS.map((name) => [name, createPanel(...NAMES[name])]))
  );
  /** @type {(() => void)[]} */
  const cleanups = [];
  const tabs = TABBED.map((name) => {
    const tab = h("button", { type: "button", role: "tab", class: "lms-tab" }, NAMES[name][1]);
    listen(cleanups, tab, "click", () => {
      open(name);
      changed();
    });
    return { name, tab };
  });
  const bar = h("div", { class: "lms-tabs", role: "tablist" }, ...tabs.map(({ tab }) => tab));
  const side = h("div", { class: "lms-side" }, bar);
  const grid = h("div", { class: "lms-grid" });
  /** @type {ViewName[]} */
  let shown = VIEWS;
  /** @type {ViewName} */
  let current = "tokens";

  /**
   * @param {ViewName} name
   * @returns {boolean} whether another one was open
   */
  function open(name) {
    if (!shown.includes(name) || name === current) return false;
    current = name;
    return true;
  }

  /** @param {Width} width */
  function place(width) {
    const behind = TABBED.filter((name) => shown.includes(name));
    const hasTabs = width !== "wide" && behind.length > 1;
    const units = hasTabs ? withSide(shown, behind) : shown.map((name) => ({ name }));
    const inGrid = [];
    /** @type {{element: HTMLElement, span: number}[]} */
    let row = [];
    const stretch = () => {
      const used = row.reduce((sum, { span }) => sum + span, 0);
      const last = row.at(-1);
      if (last) last.span += COLUMNS - used;
      for (const { element, span } of row) element.style.gridColumn = `span ${span}`;
      row = [];
    };
    const spans = width === "wide" ? SPANS : NARROW;
    for (const { name } of units) {
      const element = name === "side" ? side : panels[name].element;
      const span = width === "tiny" ? COLUMNS : name === "side" ? NARROW.tokens : spans[name];
      if (row.reduce((sum, one) => sum + one.span, 0) + span > COLUMNS) stretch();
      row.push({ element, span });
      inGrid.push(element);
    }
    stretch();
    if (hasTabs) side.replaceChildren(bar, ...behind.map((name) => panels[name].element));
    if (String([...grid.children].map(keyOf)) !== String(inGrid.map(keyOf)))
      grid.replaceChildren(...inGrid);
    for (const { name, tab } of tabs) {
      tab.hidden = !behind.includes(name);
      setAttribute(tab, "aria-selected", String(name === current));
      panels[name].element.hidden = hasTabs && name !== current;
    }
  }

  return {
    grid,
    panels,
    open,
    place,
    /**
     * Shows the named views in their order; none named: all.
     * @param {string[]} names
     */
    choose(names) {
      const known = names.filter((name) => VIEWS.includes(/** @type {ViewName} */ (name)));
      shown = known.length ? /** @type {ViewName[]} */ (known) : VIEWS;
      if (!shown.includes(current))
        current = TABBED.find((name) => shown.includes(name)) ?? current;
    },
    /** @param {ViewName} name */
    isShown(name) {
      return shown.includes(name) && !panels[name].element.hidden;
    },
    get shown() {
      return shown;
    },
    destroy() {
      for (const cleanup of cleanups) cleanup();
    },
  };
}

/** @param {Element} element */
function keyOf(element) {
  return element.className;
}

/**
 * The views in their order, those behind tabs as one at the place of the first of them.
 * @param {ViewName[]} shown
 * @param {ViewName[]} behind
 * @returns {{name: ViewName | "side"}[]}
 */
function withSide(shown, behind) {
  /** @type {{name: ViewName | "side"}[]} */
  const units = [];
  for (const name of shown) {
    if (!behind.includes(name)) units.push({ name });
    else if (!units.some((unit) => unit.name === "side")) units.push({ name: "side" });
  }
  return units;
}

/**
 * @param {string} name
 * @param {string} title
 */
function createPanel(name, title) {
  const sub = h("span", { class: "lms-sub" });
  const corner = h("span", { class: "lms-corner" });
  const body = h("div", { class: "lms-body" });
  const table = h("div", { class: "lms-table" });
  const element = h(
    "section",
    { class: `lms-panel lms-p-${name}`, "aria-label": title },
    h("h2", {}, h("span", { class: "lms-title" }, title), sub, corner),
    body,
    table,
  );
  return { element, sub, corner, body, table };
}
