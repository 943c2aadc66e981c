// @ts-check
/**
 * Commands to Python: sent at once, answered when it can. A click shows its effect without
 * waiting; only a long silence is told.
 */
import { h, icon, listen, setAttribute } from "./core/dom.js";
import { ICONS } from "./icons.js";

const SILENCE_MS = 500;
export const BUSY = "cell is running: use Interrupt";

/**
 * @param {(message: {k: "command", id: number, op: string, arg: unknown}) => void} send
 * @param {(words: string) => void} say  what the pill says; "" when all is well again
 */
export function createCommands(send, say) {
  let last = 0;
  /** @type {Map<number, ReturnType<typeof setTimeout>>} */
  const pending = new Map();
  let isBusy = false;

  return {
    /**
     * @param {string} op
     * @param {unknown} [arg]
     */
    send(op, arg = null) {
      const id = ++last;
      const timer = setTimeout(() => {
        isBusy = true;
        say(BUSY);
      }, SILENCE_MS);
      pending.set(id, timer);
      send({ k: "command", id, op, arg });
      return id;
    },
    /**
     * @param {{id: number, ok: boolean, error?: string | null}} reply
     * @returns {string} what went wrong, or ""
     */
    answer(reply) {
      clearTimeout(pending.get(reply.id));
      pending.delete(reply.id);
      if (isBusy && pending.size === 0) {
        isBusy = false;
        say("");
      }
      return reply.ok ? "" : (reply.error ?? "the command failed");
    },
    destroy() {
      for (const timer of pending.values()) clearTimeout(timer);
      pending.clear();
    },
  };
}

/**
 * The buttons of a live view, for the operations that Python says it takes.
 * @param {HTMLElement} root
 * @param {(op: string) => void} act
 */
export function createLiveControls(root, act) {
  /** @type {(() => void)[]} */
  const cleanups = [];
  let operations = new Set();
  let isPaused = false;
  /**
   * @param {() => void} click
   */
  const button = (click) => {
    const element = h("button", { type: "button", class: "lms-button", hidden: true });
    listen(cleanups, element, "click", click);
    root.append(element);
    return element;
  };
  const pause = button(() => perform("play"));
  const step = button(() => perform("forward"));
  label(step, "Step", "→", ICONS.forward);

  /**
   * @param {HTMLElement} element
   * @param {string} words
   * @param {string} key
   * @param {string} path
   */
  function label(element, words, key, path) {
    setAttribute(element, "aria-label", words);
    element.title = `${words}  [${key}]`;
    element.replaceChildren(icon(path));
  }

  /**
   * @param {string} action
   * @returns {boolean}
   */
  function perform(action) {
    const op =
      action === "play" ? (isPaused ? "resume" : "pause") : action === "forward" ? "step" : "";
    if (!operations.has(op)) return false;
    act(op);
    if (action === "play") show(isPaused ? "live" : "paused");
    return true;
  }

  /** @param {string} phase */
  function show(phase) {
    isPaused = phase === "paused";
    pause.hidden = !operations.has(isPaused ? "resume" : "pause");
    step.hidden = !operations.has("step");
    if (isPaused) label(pause, "Resume", "Space", ICONS.play);
    else label(pause, "Pause", "Space", ICONS.pause);
  }

  return {
    perform,
    show,
    /** @param {string[]} names */
    allow(names) {
      operations = new Set(names);
      show(isPaused ? "paused" : "live");
    },
    destroy() {
      for (const cleanup of cleanups) cleanup();
    },
  };
}
