// @ts-check
/**
 * The keys of a view. Every view has the same ones, so the table is here once.
 */

/**
 * @typedef {"play" | "back" | "forward" | "boundary" | "boundary_back" | "break" | "first"
 *   | "last" | "event" | "event_back" | "request" | "request_back" | "colour" | "tables" | "larger" | "smaller" | "help" | "release"} Action
 */

/** @type {[string, Action][]} */
const TABLE = [
  [" ", "play"],
  ["ArrowLeft", "back"],
  ["ArrowRight", "forward"],
  [",", "boundary_back"],
  [".", "boundary"],
  ["Home", "first"],
  ["End", "last"],
  ["e", "event"],
  ["E", "event_back"],
  ["]", "request"],
  ["[", "request_back"],
  ["a", "colour"],
  ["A", "colour"],
  ["b", "break"],
  ["B", "break"],
  ["t", "tables"],
  ["T", "tables"],
  ["+", "larger"],
  ["=", "larger"],
  ["-", "smaller"],
  ["?", "help"],
  ["Escape", "release"],
];
const ACTIONS = new Map(TABLE);

/** What `?` shows: keys and what they do. @type {[string, string, Action[]][]} */
export const HELP = [
  ["Space", "play or pause", ["play"]],
  ["← →", "a step back, on", ["back", "forward"]],
  [".  ,", "a struct on, back", ["boundary", "boundary_back"]],
  ["E  Shift E", "next, previous event", ["event", "event_back"]],
  ["Home  End", "first, last step", ["first", "last"]],
  ["[  ]", "previous, next request", ["request"]],
  ["B", "break here", ["break"]],
  ["A", "blocks by owner or attention", ["colour"]],
  ["T", "pictures as tables", ["tables"]],
  ["+  -", "text size", ["larger"]],
  ["Esc", "let go", ["release"]],
];

/**
 * What a key asks for, or null. Keys with Ctrl, Alt or Meta belong to the page.
 * @param {{key: string, ctrlKey?: boolean, altKey?: boolean, metaKey?: boolean}} event
 * @returns {Action | null}
 */
export function actionOf(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return null;
  return ACTIONS.get(event.key) ?? null;
}

/**
 * Handles keys on `root` and keeps them from the notebook, whose command mode acts on letters.
 * @param {HTMLElement} root
 * @param {(action: Action) => boolean} perform  false when there is nothing to do
 * @returns {() => void} ends it
 */
export function listenToKeys(root, perform) {
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.key === "Tab") return;
    event.stopPropagation();
    if (event.defaultPrevented) return;
    const target = /** @type {HTMLElement} */ (event.target);
    // A focused button or branch of a tree keeps Space and Enter, a slider its arrows.
    if (/^(BUTTON|SUMMARY)$/.test(target.tagName) && (event.key === " " || event.key === "Enter"))
      return;
    if (target.tagName === "INPUT" || target.tagName === "SELECT") {
      if (event.key !== "Escape" && event.key !== "?" && !/^[a-zA-Z[\]]$/.test(event.key)) return;
    }
    const action = actionOf(event);
    if (action && perform(action)) event.preventDefault();
  };
  root.addEventListener("keydown", onKey);
  return () => root.removeEventListener("keydown", onKey);
}
