// @ts-check
/**
 * Light or dark, and the colours and fonts of the page we live in: JupyterLab's variables
 * first, then VS Code's, then what the reader's system prefers.
 */
import { parseColour, toHex } from "./colour.js";
import { makeColours, themeOf } from "./palette.js";

/** @typedef {import("./palette.js").Colours} Colours */
/** @typedef {import("./palette.js").ThemeName} ThemeName */
/** @typedef {{colours: Colours, ui: string, mono: string, textSize: number}} Theme */

const UI =
  'var(--jp-ui-font-family, var(--vscode-font-family, "Helvetica Neue", Arial, system-ui, sans-serif))';
const MONO =
  'var(--jp-code-font-family, var(--vscode-editor-font-family, ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace))';
/** A colour that no theme has: what a variable falls back to when it is not set. */
const NOT_SET = "rgb(1, 2, 3)";
const BACKGROUND = ["--jp-layout-color1", "--vscode-editor-background"];
const INK = ["--jp-ui-font-color1", "--vscode-editor-foreground"];

/**
 * Reads the theme for `root` and writes the variables its style sheet uses.
 * @param {HTMLElement} root
 * @param {"auto" | ThemeName} choice
 * @param {number} textSize px
 * @returns {Theme}
 */
export function applyTheme(root, choice, textSize) {
  // A view is often made before it is put into the page: then the page speaks for it.
  const place = root.isConnected ? root : document.body;
  const host = hostColours(place);
  const hostName = host.name ?? preferredName();
  const name = choice === "auto" ? hostName : choice;
  // A forced theme that is not the host's cannot borrow the host's background.
  const colours = makeColours(name, name === hostName ? host : {});
  const roles = {
    background: colours.background,
    raised: colours.raised,
    ink: colours.ink,
    soft: colours.soft,
    line: colours.line,
    "line-soft": colours.lineSoft,
    focus: colours.focus,
    trouble: colours.trouble,
    "trouble-text": colours.troubleText,
    "trouble-tint": colours.troubleTint,
    good: colours.good,
    ui: UI,
    mono: MONO,
    size: `${textSize}px`,
  };
  colours.surprise.forEach(({ ground, text }, level) => {
    root.style.setProperty(`--lms-level-${level}`, ground);
    root.style.setProperty(`--lms-on-level-${level}`, text);
  });
  for (const [role, value] of Object.entries(roles)) root.style.setProperty(`--lms-${role}`, value);
  root.style.colorScheme = name;
  root.dataset.theme = name;
  return {
    colours,
    ui: resolve(place, "font-family", UI) || "sans-serif",
    mono: resolve(place, "font-family", MONO) || "monospace",
    textSize,
  };
}

/**
 * Calls `listener` when the page or the system changes its theme. Returns what ends it.
 * @param {() => void} listener
 * @returns {() => void}
 */
export function watchTheme(listener) {
  const observer = new MutationObserver(listener);
  const attributeFilter = [
    "data-jp-theme-name",
    "data-jp-theme-light",
    "data-vscode-theme-kind",
    "class",
  ];
  observer.observe(document.body, { attributes: true, attributeFilter });
  observer.observe(document.documentElement, { attributes: true, attributeFilter });
  const media = window.matchMedia?.("(prefers-color-scheme: dark)");
  media?.addEventListener?.("change", listener);
  return () => {
    observer.disconnect();
    media?.removeEventListener?.("change", listener);
  };
}

/**
 * @param {HTMLElement} place
 * @returns {{name?: ThemeName, background?: string, ink?: string}}
 */
function hostColours(place) {
  const ground = firstColour(place, BACKGROUND, undefined);
  if (!ground) return {};
  const ink = firstColour(place, INK, ground);
  const told = document.body.dataset.jpThemeLight;
  const name = told === "true" ? "light" : told === "false" ? "dark" : themeOf(toHex(ground));
  return { name, background: toHex(ground), ink: ink ? toHex(ink) : undefined };
}

/**
 * @param {HTMLElement} place
 * @param {string[]} names
 * @param {import("./colour.js").Rgb | undefined} ground
 */
function firstColour(place, names, ground) {
  for (const name of names) {
    const found = resolve(place, "color", `var(${name}, ${NOT_SET})`);
    const colour = found === NOT_SET ? null : parseColour(found, ground);
    if (colour) return colour;
  }
  return null;
}

/** @returns {ThemeName} */
function preferredName() {
  return window.matchMedia?.("(prefers-color-scheme: dark)")?.matches ? "dark" : "light";
}

/**
 * The value that a property of an element in `place` would have, with all variables resolved.
 * @param {HTMLElement} place
 * @param {string} property
 * @param {string} value
 */
function resolve(place, property, value) {
  const probe = document.createElement("span");
  probe.hidden = true;
  probe.style.setProperty(property, value);
  place.append(probe);
  const found = getComputedStyle(probe).getPropertyValue(property);
  probe.remove();
  return found;
}
