// @ts-check
/**
 * A struct as a tree to unfold. What a branch holds is made when it is opened, so a struct that
 * passes by costs its top level only.
 */
import { h, textNodes } from "./core/dom.js";

/** @typedef {import("./core/picture.js").StructTree} StructTree */

/** The key under which Python says how many entries it left out. */
const CUT = "…";
const PREVIEW = 96;
/** While structs pass by, one is shown for so long: more often nobody can read them. */
const PASSING_MS = 500;
/** Fields that are open until somebody closes them. */
const OPEN = ["SchedulerOutput.decisions"];

export function createStructTree() {
  const element = h("div", { class: "lms-struct" });
  const empty = h("p", { class: "lms-void" }, "No struct has crossed a boundary yet.");
  /** @type {Map<string, boolean>} */
  const opened = new Map(OPEN.map((path) => [path, true]));
  /** @type {StructTree | null | undefined} */
  let drawn;
  let drawnAt = Number.NEGATIVE_INFINITY;
  /** What is shown when the time of the one before is over. @type {StructTree | null} */
  let latest = null;
  /** @type {ReturnType<typeof setTimeout> | null} */
  let waiting = null;

  /**
   * @param {string} name
   * @param {any} value
   * @param {string} path
   * @param {boolean} isChanged
   */
  function node(name, value, path, isChanged) {
    const dot = isChanged
      ? h("span", { class: "lms-changed", title: "differs from the last one of its kind" }, "●")
      : "";
    const words = isChanged ? h("span", { class: "lms-hidden" }, " changed ") : "";
    const head = [h("span", { class: "lms-key" }, ...textNodes(name)), " ", dot, words, " "];
    const entries = entriesOf(value);
    if (entries === null || !entries.length) {
      return h("div", { class: "lms-leaf" }, ...head, ...textNodes(preview(value, 240)));
    }
    const summary = h("summary", {}, ...head, ...textNodes(preview(value, PREVIEW)));
    const details = h("details", {}, summary);
    const fill = () => {
      if (details.childElementCount > 1) return;
      details.append(
        ...entries.map(([key, inner]) =>
          key === CUT
            ? h("div", { class: "lms-leaf lms-soft" }, `${inner} more`)
            : node(key, inner, `${path}.${key}`, false),
        ),
      );
    };
    if (opened.get(path)) {
      details.open = true;
      fill();
    }
    details.addEventListener("toggle", () => {
      opened.set(path, details.open);
      if (details.open) fill();
    });
    return details;
  }

  /** @param {StructTree | null} struct */
  function draw(struct) {
    if (waiting !== null) clearTimeout(waiting);
    waiting = null;
    if (struct === drawn) return;
    drawn = struct;
    drawnAt = Date.now();
    if (!struct) {
      element.replaceChildren(empty);
      return;
    }
    const { kind, fields, changed } = struct;
    const isFocused = element.contains(document.activeElement);
    const place = isFocused
      ? [...element.querySelectorAll("summary")].indexOf(
          /** @type {any} */ (document.activeElement),
        )
      : -1;
    const title = h("div", { class: "lms-kind" }, h("b", {}, kind));
    if (changed.length) {
      title.append(
        " ",
        h("span", { class: "lms-changed", "aria-hidden": "true" }, "●"),
        h("span", { class: "lms-soft" }, " differs from the one before"),
      );
    }
    element.replaceChildren(
      title,
      ...fields.map(([name, value]) =>
        node(name, value, `${kind}.${name}`, changed.includes(name)),
      ),
    );
    element.querySelectorAll("summary")[place]?.focus();
  }

  return {
    element,
    /**
     * @param {StructTree | null} struct
     * @param {boolean} [isPassing]  another one may come at once
     */
    update(struct, isPassing = false) {
      latest = struct;
      const wait = drawnAt + PASSING_MS - Date.now();
      if (!isPassing || wait <= 0 || wait > PASSING_MS) draw(struct);
      else waiting ??= setTimeout(() => draw(latest), wait);
    },
    destroy() {
      if (waiting !== null) clearTimeout(waiting);
    },
  };
}

/**
 * What a value holds, by key; null for one that holds nothing.
 * @param {any} value
 * @returns {[string, any][] | null}
 */
function entriesOf(value) {
  if (value === null || typeof value !== "object") return null;
  if (!Array.isArray(value)) return Object.entries(value);
  // A short list of numbers is read in one line.
  if (value.every((one) => typeof one !== "object" || one === null) && value.length <= 4) return [];
  return value.map((one, k) => {
    if (one !== null && typeof one === "object" && CUT in one) return [CUT, one[CUT]];
    return [nameOf(one, k), one];
  });
}

/**
 * An entry of a list is best known by the request it is about.
 * @param {any} value
 * @param {number} place
 * @returns {string}
 */
function nameOf(value, place) {
  const id = value?.request_id ?? value?.req_id;
  return typeof id === "string" ? id : String(place);
}

/**
 * A value in one line.
 * @param {any} value
 * @param {number} room  characters
 * @returns {string}
 */
export function preview(value, room) {
  const text = write(value, room);
  return text.length > room ? `${text.slice(0, room - 1)}…` : text;
}

/**
 * @param {any} value
 * @param {number} room
 * @returns {string}
 */
function write(value, room) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "string") return `'${value}'`;
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return String(value);
  if (typeof value.why === "string") return `'${value.why}'`;
  const parts = [];
  let length = 0;
  const entries = Array.isArray(value)
    ? value.map((one, k) => [nameOf(one, k), one])
    : Object.entries(value);
  const isNamed = !Array.isArray(value) || value.some((one, k) => nameOf(one, k) !== String(k));
  for (const [key, inner] of entries) {
    if (length > room) break;
    const isCut =
      key === CUT ||
      (inner !== null &&
        typeof inner === "object" &&
        CUT in inner &&
        Object.keys(inner).length === 1);
    const part = isCut ? "…" : isNamed ? `${key}: ${write(inner, room)}` : write(inner, room);
    parts.push(part);
    length += part.length;
  }
  const inside = parts.join(", ");
  return Array.isArray(value) && !isNamed
    ? `(${inside}${parts.length === 1 ? "," : ""})`
    : `{${inside}}`;
}
