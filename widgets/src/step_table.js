// @ts-check
/**
 * The timeline as a table, for readers who do not see it.
 */
import { h, textNodes } from "./core/dom.js";
import { count, MISSING } from "./core/format.js";

const SHOWN = 200;
const HEADS = [
  ...["step", "tokens", "decode", "prefill", "computed again", "from cache"],
  ...["blocks used", "kept", "waiting", "preempted"],
];

/**
 * The steps that end at the cursor.
 * @param {HTMLElement} element
 * @param {import("./core/history.js").History} history
 * @param {number} cursor
 */
export function drawStepTable(element, history, cursor) {
  const entries = history.entries.slice(Math.max(0, cursor + 1 - SHOWN), cursor + 1).reverse();
  const rows = entries.map(({ step, stat, preempted }) => {
    const numbers = [step, stat.scheduled, stat.decode, stat.prefill, stat.recompute, stat.cached];
    const cells = [...numbers, stat.used, stat.kept, stat.waiting].map((value) =>
      h("td", {}, count(value)),
    );
    return h("tr", {}, ...cells, h("td", {}, ...textNodes(preempted.join(" ") || MISSING)));
  });
  const heads = h("tr", {}, ...HEADS.map((head) => h("th", { scope: "col" }, head)));
  element.replaceChildren(h("table", {}, h("thead", {}, heads), h("tbody", {}, ...rows)));
}
