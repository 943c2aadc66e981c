// @ts-check
/**
 * Elements from plain data. Strings become text nodes: there is no way to markup from here.
 */
import { fragments } from "./format.js";

/** @typedef {Node | string | number | null | undefined | false} Child */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | number | boolean | null | undefined>} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(typeof child === "number" ? String(child) : child);
  }
  return element;
}

/**
 * Text with its hidden characters as visible chips.
 * @param {string} text
 * @returns {(Node)[]}
 */
export function textNodes(text) {
  return fragments(text).map((fragment) =>
    fragment.escaped
      ? h("span", { class: "lms-escape" }, fragment.text)
      : document.createTextNode(fragment.text),
  );
}

/**
 * Sets the text only when it differs, so that a frame that changes nothing costs no layout.
 * @param {HTMLElement} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * @param {Element} element
 * @param {string} name
 * @param {string} value
 */
export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/**
 * Hides or shows, and writes nothing where that is so already: a frame would restyle the element.
 * @param {HTMLElement} element
 * @param {boolean} is
 */
export function setHidden(element, is) {
  if (element.hidden !== is) element.hidden = is;
}

/**
 * @param {string} path in a square of 16
 * @param {string} [className]
 */
export function icon(path, className = "lms-icon") {
  const svg = document.createElementNS(SVG, "svg");
  const shape = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", className);
  shape.setAttribute("d", path);
  svg.append(shape);
  return svg;
}

/**
 * Listens, and remembers how to stop.
 * @param {(() => void)[]} cleanups
 * @param {EventTarget} target
 * @param {string} type
 * @param {(event: any) => void} listener
 * @param {AddEventListenerOptions} [options]
 */
export function listen(cleanups, target, type, listener, options) {
  target.addEventListener(type, listener, options);
  cleanups.push(() => target.removeEventListener(type, listener, options));
}
