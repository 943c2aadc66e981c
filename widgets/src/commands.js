// @ts-check
/**
 * Commands to Python: sent at once, answered when it can. A click shows its effect without
 * waiting; only a long silence is told.
 */
import { h, icon, listen, setAttribute } from "./core/dom.js";
import { KINDS } from "./debugger.js";
import { ICONS } from "./icons.js";
import { createSpeed } from "./speed.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./core/keys.js").Action} Action */
/** @typedef {import("./actions.js").Actions} Actions */

/**
 * Moves through what has been, in the page alone.
 * @typedef {object} Look
 * @property {() => boolean} isBack
 * @property {(action: Action) => boolean} perform  false when there is nothing there
 */

const SILENCE_MS = 500;
/** So long a click is believed against what frames say. */
const TRUSTED_MS = 1500;
export const BUSY = "cell is running: use Interrupt";
const MOVES = new Set(["back", "forward", "first", "last", "event", "event_back"]);

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
 * What can be done with a live view, for the operations that Python says it takes: with the
 * engine itself, with a replay, or by looking back at what has been.
 * @param {object} given
 * @param {(op: string, arg?: unknown) => void} given.act
 * @param {() => Picture} given.picture
 * @param {Look} given.look
 * @param {() => void} given.changed  something shows its effect before Python has answered
 */
export function createLiveActions({ act, picture, look, changed }) {
  let operations = new Set();
  let isPaused = false;
  /** What a click has asked for and Python has not shown yet. */
  let asked = /** @type {{isPaused: boolean, at: number} | null} */ (null);

  /**
   * @param {string} op
   * @param {unknown} [argument]
   */
  function send(op, argument = null) {
    if (!operations.has(op)) return false;
    act(op, argument);
    return true;
  }

  function play() {
    if (!send(isPaused ? "resume" : "pause")) return false;
    isPaused = !isPaused;
    asked = { isPaused, at: Date.now() };
    changed();
    return true;
  }

  /** On to where the next step stands as this one does. */
  function stepOn() {
    const { at } = picture();
    return send("step", KINDS[at > 0 ? at : 1]);
  }

  function toggleBreak() {
    const { at, breaks } = picture();
    const name = KINDS[at];
    if (name === undefined) return false;
    return send(breaks.some(([known]) => known === name) ? "unbreak" : "break", name);
  }

  /** @param {Action} action */
  function perform(action) {
    if (action === "play") return play();
    if (action === "break") return toggleBreak();
    const isReplay = operations.has("seek");
    if (MOVES.has(action) && (isReplay || look.isBack() || action !== "forward"))
      return look.perform(action);
    if (action === "forward") return stepOn();
    if (action === "boundary") return look.isBack() ? look.perform("forward") : send("step");
    if (action === "boundary_back") return send("back") || look.perform("back");
    return false;
  }

  /** @type {Actions} */
  const actions = {
    get isPaused() {
      return isPaused;
    },
    get isReplay() {
      return operations.has("seek");
    },
    can: (op) => operations.has(op) || op === "back",
    perform,
    stepTo: (kind) => send("step", kind),
    send,
  };
  return {
    actions,
    /** @param {string} phase  as Python tells it */
    show(phase) {
      const told = phase === "paused";
      // Frames that left before the click arrived do not take back its effect.
      if (asked && told !== asked.isPaused && Date.now() - asked.at < TRUSTED_MS) return;
      asked = null;
      isPaused = told;
    },
    /** What was asked for is not going to be. */
    refused() {
      asked = null;
    },
    /** @param {string[]} names */
    allow(names) {
      operations = new Set(names);
    },
  };
}

/**
 * The buttons in the head of a live view.
 * @param {HTMLElement} root
 * @param {Actions} actions
 */
export function createLiveControls(root, actions) {
  /** @type {(() => void)[]} */
  const cleanups = [];
  const button = (/** @type {Action} */ action) => {
    const element = h("button", { type: "button", class: "lms-button", hidden: true });
    listen(cleanups, element, "click", () => actions.perform(action));
    root.append(element);
    return element;
  };
  const back = button("back");
  const pause = button("play");
  const step = button("forward");
  const speed = createSpeed((value) => actions.send("speed", value));
  root.append(speed.element);
  label(back, "Step back", "←", ICONS.back);
  label(step, "Step", "→", ICONS.forward);

  return {
    /**
     * Shows what can be done now.
     * @param {number | null} [told]  the speed of a replay, null: as fast as it can
     */
    update(told) {
      speed.element.hidden = !actions.can("speed");
      if (told) speed.show(told);
      const { isPaused, isReplay } = actions;
      const words = isPaused ? (isReplay ? "Play" : "Resume") : "Pause";
      back.hidden = !isReplay;
      pause.hidden = !actions.can(isPaused ? "resume" : "pause");
      step.hidden = !actions.can("step");
      label(pause, words, "Space", isPaused ? ICONS.play : ICONS.pause);
    },
    destroy() {
      for (const cleanup of cleanups) cleanup();
    },
  };
}

/**
 * @param {HTMLElement} element
 * @param {string} words
 * @param {string} key
 * @param {string} path
 */
function label(element, words, key, path) {
  if (element.getAttribute("aria-label") === words) return;
  setAttribute(element, "aria-label", words);
  element.title = `${words}  [${key}]`;
  element.replaceChildren(icon(path));
}
