// @ts-check
/**
 * Text and numbers as the views show them. What a model writes is hostile until shown: control,
 * bidirectional and zero-width characters become visible names.
 */

/** @typedef {{text: string, escaped: boolean}} Fragment */

export const MISSING = "–";

// Controls, format characters (bidirectional, zero-width, tags), lone surrogates, line and
// paragraph separators; letters and joiners without a shape; the replacement character.
const HIDDEN =
  /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]|\u034f|\u115f|\u1160|\u17b4|\u17b5|\u3164|\uffa0|\ufffd|[\u{e0000}-\u{e0fff}]/gu;
const JOINED_BEFORE = /(\p{Extended_Pictographic}|\ufe0f|[\u{1f3fb}-\u{1f3ff}])$/u;
const JOINED_AFTER = /^\p{Extended_Pictographic}/u;
const SHORT = new Map([
  ["\n", "\\n"],
  ["\r", "\\r"],
  ["\t", "\\t"],
]);

/**
 * `text` cut into what may be shown as it is and names of characters that hide.
 * @param {string} text
 * @returns {Fragment[]}
 */
export function fragments(text) {
  /** @type {Fragment[]} */
  const found = [];
  let plain = 0;
  for (const match of text.matchAll(HIDDEN)) {
    const end = match.index + match[0].length;
    if (match[0] === "\u200d" && joinsEmoji(text, match.index)) continue;
    if (match.index > plain) found.push({ text: text.slice(plain, match.index), escaped: false });
    found.push({ text: nameOf(match[0]), escaped: true });
    plain = end;
  }
  if (plain < text.length) found.push({ text: text.slice(plain), escaped: false });
  return found;
}

/**
 * `text` with hidden characters replaced by their names, for canvas and attributes.
 * @param {string} text
 */
export function visible(text) {
  return fragments(text)
    .map((fragment) => fragment.text)
    .join("");
}

/**
 * @param {string} text
 * @param {number} at
 */
function joinsEmoji(text, at) {
  return (
    JOINED_BEFORE.test(text.slice(Math.max(0, at - 2), at)) &&
    JOINED_AFTER.test(text.slice(at + 1, at + 3))
  );
}

/** @param {string} character */
function nameOf(character) {
  const short = SHORT.get(character);
  if (short) return short;
  const code = character.codePointAt(0) ?? 0;
  const digits = code.toString(16).toUpperCase();
  // The same names as the page's table has, which Python writes.
  return code < 0x100 ? `<0x${digits.padStart(2, "0")}>` : `<U+${digits.padStart(4, "0")}>`;
}

/**
 * A whole number with thousands set apart; a missing one is an en dash.
 * @param {number | null | undefined} value
 */
export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return MISSING;
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",");
}

/**
 * @param {number | null | undefined} value
 * @param {number} digits after the point
 */
export function decimal(value, digits) {
  if (value === null || value === undefined || !Number.isFinite(value)) return MISSING;
  return value.toFixed(digits);
}

/**
 * `part` of `whole` in percent, an en dash when there is no whole.
 * @param {number} part
 * @param {number} whole
 */
export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : MISSING;
}

/**
 * @param {number} value
 * @param {string} word in the singular
 */
export function plural(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}
