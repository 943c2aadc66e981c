// @ts-check
/**
 * Arithmetic on sRGB colours. A colour is a string: `#rgb`, `#rrggbb`, `rgb(...)`.
 */

/** @typedef {[number, number, number]} Rgb  0 to 255 */

/**
 * The channels of `text`, or null when it is not a colour we can read. A translucent colour is
 * laid over `ground`.
 * @param {string} text
 * @param {Rgb} [ground]
 * @returns {Rgb | null}
 */
export function parseColour(text, ground = [255, 255, 255]) {
  const word = text.trim().toLowerCase();
  if (word === "white") return [255, 255, 255];
  if (word === "black") return [0, 0, 0];
  const hex = /^#([0-9a-f]{3}|[0-9a-f]{6})$/.exec(word);
  if (hex) {
    const digits = hex[1].length === 3 ? [...hex[1]].map((d) => d + d).join("") : hex[1];
    return /** @type {Rgb} */ (
      [0, 2, 4].map((at) => Number.parseInt(digits.slice(at, at + 2), 16))
    );
  }
  const call = /^rgba?\(([^)]*)\)$/.exec(word);
  if (!call) return null;
  const parts = call[1].split(/[\s,/]+/).filter(Boolean);
  if (parts.length < 3) return null;
  const [red, green, blue] = parts.slice(0, 3).map(Number);
  const last = parts[3] ?? "1";
  const alpha = last.endsWith("%") ? Number.parseFloat(last) / 100 : Number(last);
  if (![red, green, blue, alpha].every(Number.isFinite) || alpha === 0) return null;
  return /** @type {Rgb} */ (
    [red, green, blue].map((value, k) => Math.round(value * alpha + ground[k] * (1 - alpha)))
  );
}

/**
 * @param {Rgb} rgb
 * @returns {string}
 */
export function toHex(rgb) {
  return `#${rgb.map((value) => Math.round(value).toString(16).padStart(2, "0")).join("")}`;
}

/**
 * `share` of the second colour mixed into the first.
 * @param {string} first
 * @param {string} second
 * @param {number} share 0 to 1
 */
export function mix(first, second, share) {
  const a = parseColour(first) ?? [255, 255, 255];
  const b = parseColour(second) ?? [0, 0, 0];
  return toHex(/** @type {Rgb} */ (a.map((value, k) => value * (1 - share) + b[k] * share)));
}

/**
 * Relative luminance as WCAG defines it, 0 to 1.
 * @param {string} colour
 */
export function luminance(colour) {
  const [red, green, blue] = (parseColour(colour) ?? [0, 0, 0]).map((value) => {
    const v = value / 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/**
 * WCAG contrast, 1 to 21.
 * @param {string} first
 * @param {string} second
 */
export function contrast(first, second) {
  const a = luminance(first) + 0.05;
  const b = luminance(second) + 0.05;
  return Math.max(a, b) / Math.min(a, b);
}
