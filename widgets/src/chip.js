// @ts-check
/**
 * The name of a request, the same in every view, and a link everywhere.
 */
import { h } from "./core/dom.js";
import { visible } from "./core/format.js";

/** @typedef {import("./core/link.js").Link} Link */
/** @typedef {import("./core/palette.js").Colours} Colours */

/** Letters of a name that are shown. */
export const LONGEST_NAME = 12;

/**
 * @param {string} id
 * @param {Link} link
 */
export function createChip(id, link) {
  const name = visible(id);
  // The end of a long id tells it from the others.
  const letters = [...name];
  const short =
    letters.length > LONGEST_NAME ? `…${letters.slice(1 - LONGEST_NAME).join("")}` : name;
  const chip = h("button", { type: "button", class: "lms-chip", title: name }, short);
  chip.addEventListener("click", (event) => {
    event.stopPropagation();
    link.toggle(id);
  });
  chip.addEventListener("focus", () => link.hover(id));
  chip.addEventListener("blur", () => link.hover(null));
  return chip;
}

/**
 * @param {HTMLElement} chip
 * @param {Colours} colours
 * @param {{id: string, slot: number, state: string}} row
 * @param {Link} link
 */
export function paintChip(chip, colours, row, link) {
  const owner = colours.owner(row.slot, link.lit === row.id ? row.id : undefined);
  const key = [
    owner.edge,
    owner.tint,
    owner.pattern,
    row.state === "finished",
    link.selected === row.id,
  ].join();
  if (chip.dataset.key === key) return;
  chip.dataset.key = key;
  chip.style.setProperty("--lms-edge", owner.edge);
  chip.style.setProperty("--lms-tint", owner.tint);
  chip.dataset.pattern = owner.pattern;
  chip.classList.toggle("lms-out", row.state === "finished");
  chip.setAttribute("aria-pressed", String(link.selected === row.id));
}
