// @ts-check
/**
 * The texts beside the map, where the table of requests has no room for them.
 */
import { createChip, paintChip } from "./chip.js";
import { h, listen } from "./core/dom.js";
import { order } from "./requests.js";
import { createTextFlow } from "./text_flow.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/link.js").Link} Link */

const MOST_LINES = 40;

/**
 * @param {HTMLElement} root  an empty element
 * @param {Link} link
 */
export function createTexts(root, link) {
  const list = h("div", { class: "lms-texts" });
  const empty = h("p", { class: "lms-void" }, "No text yet.");
  root.append(list, empty);
  /** @type {Map<string, ReturnType<typeof createLine>>} */
  const lines = new Map();
  let drawnLook = "";

  return {
    /**
     * @param {Picture} picture
     * @param {{theme: import("./core/theme.js").Theme, changes: import("./core/picture.js").Changes}} look
     */
    update(picture, { theme, changes }) {
      const look = [theme.colours.name, theme.colours.background, link.lit, link.selected].join();
      const isNew = look !== drawnLook || changes.all || changes.list;
      empty.hidden = picture.rows.size > 0;
      if (!isNew && !changes.rows.size) return;
      drawnLook = look;
      const rows = order(picture).slice(0, MOST_LINES);
      const shown = new Set(rows.map((row) => row.id));
      for (const [id, line] of lines) {
        if (shown.has(id)) continue;
        line.destroy();
        lines.delete(id);
      }
      rows.forEach((row, k) => {
        const line = lines.get(row.id) ?? createLine(row.id, link);
        lines.set(row.id, line);
        if (list.children[k] !== line.element)
          list.insertBefore(line.element, list.children[k] ?? null);
        if (!isNew && !changes.rows.has(row.id)) return;
        paintChip(line.chip, theme.colours, row, link);
        line.flow.update(row);
        line.element.classList.toggle("lms-dim", link.lit !== null && link.lit !== row.id);
      });
    },
    destroy() {
      for (const line of lines.values()) line.destroy();
      lines.clear();
      root.replaceChildren();
    },
  };
}

/**
 * @param {string} id
 * @param {Link} link
 */
function createLine(id, link) {
  /** @type {(() => void)[]} */
  const cleanups = [];
  const chip = createChip(id, link);
  const text = h("div");
  const flow = createTextFlow(text);
  const element = h("div", { class: "lms-line" }, chip, text);
  listen(cleanups, element, "pointerenter", () => link.hover(id));
  listen(cleanups, element, "pointerleave", () => link.hover(null));
  return {
    ...{ element, chip, flow },
    destroy() {
      for (const cleanup of cleanups) cleanup();
      element.remove();
    },
  };
}
