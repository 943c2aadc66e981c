// @ts-check
/**
 * Marks and letters on a 2D context, shared by the pictures.
 */

import { h } from "./dom.js";

/** @typedef {import("./theme.js").Theme} Theme */
/** @typedef {import("./palette.js").Owner} Owner */
/** @typedef {{x: number, y: number, w: number, h: number}} Box */

/**
 * Gives `canvas` a size in CSS px at the screen's density and a clean context.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 * @returns {CanvasRenderingContext2D | null} null where there is no canvas
 */
export function prepare(canvas, width, height) {
  const density = globalThis.devicePixelRatio || 1;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  if (!context) return null;
  context.setTransform(density, 0, 0, density, 0, 0);
  context.textBaseline = "middle";
  context.textAlign = "left";
  return context;
}

/** Whether a canvas tells what is drawn on it; some browsers keep that to themselves. */
function tellsPixels() {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  if (!context) return false;
  context.fillStyle = "#123456";
  context.fillRect(0, 0, 1, 1);
  return String([...context.getImageData(0, 0, 1, 1).data]) === "18,52,86,255";
}

/**
 * A drawn canvas as an image, where that can be had. A browser keeps a layer for each canvas and
 * joins them all at every frame, whether they have changed or not.
 * @param {HTMLCanvasElement} canvas
 * @returns {HTMLElement}
 */
export function freeze(canvas) {
  if (!tellsPixels()) return canvas;
  const image = h("img", { alt: "", "aria-hidden": "true", decoding: "sync" });
  image.style.width = canvas.style.width;
  image.style.height = canvas.style.height;
  image.addEventListener("error", () => image.replaceWith(canvas), { once: true });
  image.src = canvas.toDataURL();
  return image;
}

/**
 * A canvas font in the notebook's own family.
 * @param {Theme} theme
 * @param {number} size px at 12 px text
 * @param {number} [weight]
 * @param {boolean} [isMono]
 */
export function font(theme, size, weight = 400, isMono = false) {
  return `${weight} ${(size * theme.textSize) / 12}px ${isMono ? theme.mono : theme.ui}`;
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Theme} theme
 * @param {string} text
 * @param {number} x
 * @param {number} y
 * @param {string} colour
 * @param {number} size
 * @param {number} [weight]
 */
export function label(context, theme, text, x, y, colour, size, weight = 400) {
  context.font = font(theme, size, weight);
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

/**
 * `text` cut at its end to `width` px.
 * @param {CanvasRenderingContext2D} context
 * @param {string} text
 * @param {number} width
 */
export function clip(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const letters = [...text];
  while (letters.length && context.measureText(`${letters.join("")}…`).width > width) letters.pop();
  return letters.length ? `${letters.join("").trimEnd()}…` : "";
}

/**
 * `text` cut at its beginning: the end of a request id tells it from the others.
 * @param {CanvasRenderingContext2D} context
 * @param {string} text
 * @param {number} width
 */
export function clipStart(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const letters = [...text];
  while (letters.length && context.measureText(`…${letters.join("")}`).width > width)
    letters.shift();
  return letters.length ? `…${letters.join("")}` : "";
}

/**
 * Lines of words, at most `most`, each at most `width` px wide.
 * @param {CanvasRenderingContext2D} context
 * @param {string} text
 * @param {number} width
 * @param {number} most
 * @returns {string[]}
 */
export function wrap(context, text, width, most) {
  /** @type {string[]} */
  const lines = [];
  let line = "";
  for (const word of text.split(/\s+/)) {
    const longer = line ? `${line} ${word}` : word;
    if (line && context.measureText(longer).width > width) {
      lines.push(line);
      line = word;
    } else line = longer;
  }
  if (line) lines.push(line);
  const shown = lines.slice(0, most);
  if (lines.length > most && most > 0) shown[most - 1] = lines.slice(most - 1).join(" ");
  return shown.map((words) => clip(context, words, width));
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {string} colour
 * @param {number} width px
 */
export function outline(context, box, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(box.x + width / 2, box.y + width / 2, box.w - width, box.h - width);
  context.lineWidth = 1;
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {string} colour
 */
export function hairline(context, box, colour) {
  outline(context, box, colour, 1);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {string} colour
 */
export function dashed(context, box, colour) {
  context.setLineDash([4, 3]);
  outline(context, { x: box.x + 0.2, y: box.y + 0.2, w: box.w - 0.4, h: box.h - 0.4 }, colour, 1.6);
  context.setLineDash([]);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {string} colour
 * @param {number} size px
 */
export function corner(context, box, colour, size) {
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(box.x, box.y);
  context.lineTo(box.x + size, box.y);
  context.lineTo(box.x, box.y + size);
  context.closePath();
  context.fill();
}

/**
 * The stripes of slots 9 to 16, the dots of 17 to 24, over a ground of the hue.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {Owner} owner
 * @param {string} ink
 */
export function pattern(context, box, owner, ink) {
  if (owner.pattern === "stripes") hatch(context, box, ink, 5);
  if (owner.pattern !== "dots") return;
  context.fillStyle = ink;
  const middle = Math.round(box.y + box.h / 2 - 1);
  for (let x = box.x + 2; x + 2 <= box.x + box.w; x += 5) context.fillRect(x, middle, 2, 2);
}

/**
 * Slanted lines in a box, `step` px apart.
 * @param {CanvasRenderingContext2D} context
 * @param {Box} box
 * @param {string} colour
 * @param {number} step px
 */
export function hatch(context, box, colour, step) {
  const { x, y, w, h } = box;
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1.2;
  context.beginPath();
  for (let at = x - h; at < x + w; at += step) {
    context.moveTo(at, y + h);
    context.lineTo(at + h, y);
  }
  context.stroke();
  context.restore();
}

/**
 * A triangle that points down: a preemption.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x middle
 * @param {number} y top
 * @param {number} radius px
 * @param {string} colour
 */
export function triangle(context, x, y, radius, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(x - radius, y);
  context.lineTo(x + radius, y);
  context.lineTo(x, y + radius * 1.7);
  context.closePath();
  context.fill();
}

/**
 * A hairline from left to right.
 * @param {CanvasRenderingContext2D} context
 * @param {number} from
 * @param {number} y
 * @param {number} to
 * @param {string} colour
 */
export function line(context, from, y, to, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(from, y + 0.5);
  context.lineTo(to, y + 0.5);
  context.stroke();
}
