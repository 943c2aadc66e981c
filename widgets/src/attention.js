// @ts-check
/**
 * Attention on the map: how dark a block is for the share that it gets, the words for it, and the
 * switch between this colour and the owner's.
 */
import { h, setAttribute } from "./core/dom.js";
import { decimal } from "./core/format.js";
import { IN_USE } from "./core/picture.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/palette.js").Colours} Colours */
/** @typedef {import("./core/palette.js").Ground} Ground */
/** @typedef {"owner" | "attention"} ColourBy */

const MOST_LEVEL = 255;

/**
 * The ground of a level. Steps go with the square root, so that small shares can be seen beside
 * the one that takes half of all attention.
 * @param {Colours} colours
 * @param {number} level  0 to 255
 * @returns {Ground | null}  null: next to none
 */
export function groundOf({ attention }, level) {
  if (level <= 0) return null;
  const last = attention.length - 1;
  return attention[Math.min(last, Math.round(last * Math.sqrt(level / MOST_LEVEL)))];
}

/** @param {number} share  0 to 1 */
export function percent(share) {
  return share > 0 && share < 0.001 ? "below 0.1 %" : `${decimal(share * 100, 1)} %`;
}

/**
 * What a block, or the blocks of a bin, get of the step's attention; "" where nobody measured it.
 * @param {Picture} picture
 * @param {number} from
 * @param {number} [to]
 */
export function attentionWords(picture, from, to = from + 1) {
  if (!picture.mass) return "";
  const level = picture.levelOf(from, to);
  const share = percent((picture.mass.top * level) / MOST_LEVEL);
  if (to - from > 1)
    return level ? `a block of these gets ${share} of the step's attention` : "no attention";
  if (level) return `${share} of the step's attention`;
  return (picture.state[from] & 0xf) === IN_USE ? "next to none of the step's attention" : "";
}

/**
 * The switch in the head of the map.
 * @param {HTMLElement} corner
 * @param {() => void} toggle
 */
export function createColourSwitch(corner, toggle) {
  const sides = ["owner", "attention"].map((name) => h("span", { "data-colour": name }, name));
  const button = h(
    "button",
    {
      ...{ type: "button", class: "lms-button lms-scale lms-colour", hidden: true },
      ...{ title: "Colour blocks by owner or by attention  [A]", "aria-label": "colour of blocks" },
    },
    ...sides,
  );
  button.addEventListener("click", toggle);
  corner.append(button);
  return {
    /**
     * @param {ColourBy} colour
     * @param {boolean} isOffered
     */
    update(colour, isOffered) {
      button.hidden = !isOffered;
      for (const side of sides)
        setAttribute(side, "aria-current", String(side.dataset.colour === colour));
    },
    destroy() {
      button.removeEventListener("click", toggle);
      button.remove();
    },
  };
}
