// @ts-check
/**
 * The one request that is lit in every view: pointed at for a moment, or kept by a click.
 */

/**
 * @typedef {object} Link
 * @property {string | null} lit       the request to light, or null: all are alike
 * @property {string | null} selected  the one that a click keeps lit
 * @property {(id: string | null) => void} hover
 * @property {(id: string) => void} toggle
 * @property {(id: string | null) => void} select
 * @property {() => boolean} release   lets go; false when nothing was kept
 * @property {(listener: () => void) => () => void} subscribe  returns what ends it
 */

/** @returns {Link} */
export function createLink() {
  /** @type {Set<() => void>} */
  const listeners = new Set();
  /** @type {string | null} */
  let hovered = null;
  /** @type {string | null} */
  let selected = null;

  /** @param {() => void} change */
  const change = (change) => {
    const before = [hovered, selected];
    change();
    if (before[0] === hovered && before[1] === selected) return;
    for (const listener of [...listeners]) listener();
  };

  return {
    get lit() {
      return hovered ?? selected;
    },
    get selected() {
      return selected;
    },
    hover: (id) =>
      change(() => {
        hovered = id;
      }),
    toggle: (id) =>
      change(() => {
        selected = selected === id ? null : id;
        hovered = null;
      }),
    select: (id) =>
      change(() => {
        selected = id;
        hovered = null;
      }),
    release() {
      const had = selected !== null || hovered !== null;
      change(() => {
        selected = null;
        hovered = null;
      });
      return had;
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}
