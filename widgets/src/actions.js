// @ts-check
/**
 * What can be done with a run: by buttons, by keys, in a live engine, a replay or a page.
 */

/** @typedef {import("./core/keys.js").Action} Action */

/**
 * @typedef {object} Actions
 * @property {boolean} isPaused
 * @property {boolean} isReplay   it plays something that has already been
 * @property {(op: string) => boolean} can
 *   "pause", "resume", "step", "back", "break", "unbreak", "seek"
 * @property {(action: Action) => boolean} perform  false when there is nothing to do
 * @property {(kind: string) => unknown} stepTo        on to the next struct of a kind
 * @property {(op: string, argument?: unknown) => boolean | void} send  false when it cannot
 */

/** A view that nothing can be done with. @type {Actions} */
export const NOTHING = {
  ...{ isPaused: false, isReplay: false },
  can: () => false,
  perform: () => false,
  stepTo: () => {},
  send: () => {},
};
