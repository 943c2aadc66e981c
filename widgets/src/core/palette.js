// @ts-check
/**
 * The colours of the views, from the one palette that Python reads as well. Hue is a request;
 * everything else is ink, weight, outline or pattern, except trouble.
 */
import palette from "../../lmscope_widgets/palette.json" with { type: "json" };
import { contrast, luminance, mix } from "./colour.js";

/** @typedef {"light" | "dark"} ThemeName */
/** @typedef {"solid" | "stripes" | "dots"} Pattern */

/**
 * @typedef {object} Owner
 * @property {string} hue      full colour: edges, feet, lanes
 * @property {string} tint     ground under text
 * @property {string} edge     the hue, darkened where it would be too pale for a line
 * @property {string} small    the hue in cells too small for a pattern
 * @property {string} onHue    text on the full hue
 * @property {Pattern} pattern
 */

/** @typedef {{ground: string, text: string}} Ground  a colour and the text that reads on it */

/**
 * @typedef {object} Colours
 * @property {ThemeName} name
 * @property {string} background
 * @property {string} raised
 * @property {string} ink
 * @property {string} soft
 * @property {string} line
 * @property {string} lineSoft
 * @property {string} focus
 * @property {string} trouble
 * @property {string} troubleText
 * @property {string} troubleTint
 * @property {string} good
 * @property {{decode: string, prefill: string, recompute: string, cached: string}} work
 * @property {{ground: string, text: string}[]} surprise  from expected to surprising
 * @property {Ground[]} attention  from little to most, in even steps of lightness
 * @property {(slot: number, ownHueOf?: string) => Owner} owner
 */

/** Slots from here on have no hue of their own. */
export const NEUTRAL_SLOT = 254;
export const NO_SLOT = 255;

const DARK_TEXT = "#15181C";
const LIGHT_TEXT = "#FFFFFF";
/** Least contrast of text, as WCAG asks for. */
const READABLE = 4.5;
/** How far the second eight are shifted where stripes would be noise. */
const SMALL_SHIFT = 0.42;

/**
 * The colours of a theme on the host's own background and ink.
 * @param {ThemeName} name
 * @param {{background?: string, ink?: string}} [host]
 * @returns {Colours}
 */
export function makeColours(name, host = {}) {
  const roles = palette[name];
  const background = host.background ?? roles.background;
  const ink = host.ink ?? roles.ink;
  /** @type {Map<string, Owner>} */
  const made = new Map();
  return {
    name,
    background,
    ink,
    raised: host.background ? mix(background, ink, 0.045) : roles.raised,
    soft: readable(roles.ink_soft, background, ink),
    line: roles.line,
    lineSoft: roles.line_soft,
    focus: roles.focus,
    trouble: roles.trouble,
    troubleText: readable(roles.trouble_text, background, ink),
    troubleTint: roles.trouble_tint,
    good: readable(roles.good, background, ink),
    work: palette.work[name],
    surprise: palette.surprise[name].map((ground, level) => ({
      ground,
      text: level === 0 ? ink : textOn(ground, palette.surprise[`${name}_text`][level]),
    })),
    attention: palette.attention[name].map((ground) => ({
      ground,
      text: [ink, background].find((text) => contrast(ground, text) >= READABLE) ?? starkOn(ground),
    })),
    owner(slot, ownHueOf) {
      const key = `${slot} ${ownHueOf ?? ""}`;
      let owner = made.get(key);
      if (!owner) {
        owner = makeOwner(name, background, ink, slot, ownHueOf);
        made.set(key, owner);
      }
      return owner;
    },
  };
}

/**
 * Text colour that reads on `ground`: the wanted one if it does, else the better of dark and light.
 * @param {string} ground
 * @param {string} [wanted]
 */
export function textOn(ground, wanted) {
  if (wanted && contrast(ground, wanted) >= READABLE) return wanted;
  return contrast(ground, DARK_TEXT) > contrast(ground, LIGHT_TEXT) ? DARK_TEXT : LIGHT_TEXT;
}

/**
 * Black or white: one of them reads on any ground, which our softer ones do not in the middle.
 * @param {string} ground
 */
function starkOn(ground) {
  return contrast(ground, "#000000") > contrast(ground, "#FFFFFF") ? "#000000" : "#FFFFFF";
}

/**
 * @param {ThemeName} name
 * @param {string} background
 * @param {string} ink
 * @param {number} slot
 * @param {string} [ownHueOf] id of a request without a slot that is pointed at: it takes a hue
 * @returns {Owner}
 */
function makeOwner(name, background, ink, slot, ownHueOf) {
  const { owners } = palette;
  const hues = /** @type {Record<string, string>} */ (owners[name]);
  const isNeutral = slot >= owners.neutral_beyond && ownHueOf === undefined;
  const place = slot < owners.neutral_beyond ? slot : hash(ownHueOf ?? "");
  const hue = isNeutral ? owners.neutral[name] : hues[owners.order[place % owners.order.length]];
  const ring = slot < owners.neutral_beyond ? Math.floor(slot / owners.order.length) : 0;
  const shifted = mix(hue, name === "dark" ? LIGHT_TEXT : DARK_TEXT, SMALL_SHIFT);
  return {
    hue,
    tint: tintUnder(ink, background, hue, owners.tint[name]),
    edge: contrast(hue, background) < owners.edge_below ? mix(hue, ink, owners.edge_mix) : hue,
    small: ring === 0 ? hue : ring === 1 ? shifted : owners.neutral[name],
    onHue: textOn(hue),
    pattern: ring === 0 ? "solid" : ring === 1 ? "stripes" : "dots",
  };
}

/**
 * The hue laid over the background, as much of it as leaves the ink on it readable. On our own
 * backgrounds that is all of `share`; a host's may be nearer to its ink.
 * @param {string} ink
 * @param {string} background
 * @param {string} hue
 * @param {number} share
 */
function tintUnder(ink, background, hue, share) {
  for (let part = share; part > 0.1; part -= 0.02) {
    const tint = mix(background, hue, part);
    if (contrast(ink, tint) >= READABLE) return tint;
  }
  return mix(background, hue, 0.1);
}

/**
 * `colour`, moved towards the ink until it reads on `background`.
 * @param {string} colour
 * @param {string} background
 * @param {string} ink
 */
function readable(colour, background, ink) {
  for (let part = 0; part < 1; part += 0.1) {
    const text = part === 0 ? colour : mix(colour, ink, part);
    if (contrast(text, background) >= READABLE) return text;
  }
  return ink;
}

/** @param {string} text */
function hash(text) {
  let value = 0;
  for (const letter of text) value = (value * 31 + (letter.codePointAt(0) ?? 0)) >>> 0;
  return value;
}

/**
 * @param {string} background
 * @returns {ThemeName}
 */
export function themeOf(background) {
  return luminance(background) < 0.2 ? "dark" : "light";
}
