// @ts-check
/**
 * Buttons and a slider that move through the steps of a recorded run.
 */
import { h, icon, listen, setAttribute, setText } from "./core/dom.js";
import { count } from "./core/format.js";
import { ICONS } from "./icons.js";
import { createSpeed } from "./speed.js";

const STEP_MS = 350;

/**
 * A run is a row of frames, one or more to a step; the slider and the arrows go by steps.
 * @typedef {object} Run
 * @property {number} length  frames
 * @property {number} steps
 * @property {(place: number) => void} seek
 * @property {(place: number) => number} stepOf
 * @property {(place: number) => number} entryOf   which of the steps a frame belongs to
 * @property {(entry: number) => number} placeOf   the last frame of a step
 * @property {() => void} changed  it plays, or has stopped
 * @property {(entry: number, direction: 1 | -1) => number | null} nextEvent
 */

/**
 * @param {HTMLElement} root
 * @param {Run} run
 */
export function createTransport(root, run) {
  /** @type {(() => void)[]} */
  const cleanups = [];
  let place = 0;
  let speed = 1;
  const entry = () => run.entryOf(place);
  /** @type {ReturnType<typeof setInterval> | null} */
  let timer = null;

  /** @param {number} wanted */
  function goToEntry(wanted) {
    go(run.placeOf(Math.max(0, Math.min(run.steps - 1, wanted))));
  }

  /** @param {number} wanted */
  function go(wanted) {
    const held = Math.max(0, Math.min(run.length - 1, wanted));
    if (held !== place) run.seek(held);
  }

  function stop() {
    if (timer !== null) clearInterval(timer);
    timer = null;
    showPlay();
  }

  function togglePlay() {
    if (timer !== null) return stop();
    if (place >= run.length - 1) go(0);
    playOn();
    showPlay();
  }

  function playOn() {
    if (timer !== null) clearInterval(timer);
    timer = setInterval(() => {
      if (place >= run.length - 1) stop();
      else goToEntry(entry() + 1);
    }, STEP_MS / speed);
  }

  function showPlay() {
    const words = timer === null ? "Play" : "Pause";
    setAttribute(play, "aria-label", words);
    play.title = `${words}  [Space]`;
    play.replaceChildren(icon(timer === null ? ICONS.play : ICONS.pause));
    run.changed();
  }

  /**
   * @param {string} path
   * @param {string} words
   * @param {string} key
   * @param {() => void} act
   */
  function button(path, words, key, act) {
    const element = h(
      "button",
      { type: "button", class: "lms-button", "aria-label": words, title: `${words}  [${key}]` },
      icon(path),
    );
    listen(cleanups, element, "click", act);
    root.append(element);
    return element;
  }

  /** @type {Record<string, () => void>} */
  const actions = {
    play: togglePlay,
    back: () => stopAt(run.placeOf(Math.max(0, entry() - 1))),
    forward: () => stopAt(run.placeOf(Math.min(run.steps - 1, entry() + 1))),
    boundary_back: () => stopAt(place - 1),
    boundary: () => stopAt(place + 1),
    first: () => stopAt(0),
    last: () => stopAt(run.length - 1),
    event: () => jump(1),
    event_back: () => jump(-1),
  };

  /** @param {number} wanted */
  function stopAt(wanted) {
    stop();
    go(wanted);
  }

  /** @param {1 | -1} direction */
  function jump(direction) {
    stop();
    const found = run.nextEvent(entry(), direction);
    if (found !== null) goToEntry(found);
  }

  button(ICONS.first, "First step", "Home", actions.first);
  button(ICONS.back, "Step back", "←", actions.back);
  const play = button(ICONS.play, "Play", "Space", actions.play);
  button(ICONS.forward, "Step on", "→", actions.forward);
  button(ICONS.last, "Last step", "End", actions.last);
  button(ICONS.event, "Next event", "E", actions.event);
  const slider = h("input", {
    ...{ type: "range", class: "lms-slider", "aria-label": "step", min: 0, max: run.steps - 1 },
    ...{ step: 1, value: 0 },
  });
  listen(cleanups, slider, "input", () => {
    stop();
    goToEntry(Number(slider.value));
  });
  const choice = createSpeed((value) => {
    speed = value;
    if (timer !== null) playOn();
  });
  const number = h("b");
  const total = h("span", { class: "lms-soft" });
  root.append(choice.element, slider, h("span", { class: "lms-step" }, "step ", number, total));
  setText(total, ` / ${count(run.stepOf(run.length - 1))}`);

  return {
    slider,
    get place() {
      return place;
    },
    get isPlaying() {
      return timer !== null;
    },
    stop,
    /** @param {number} next  the place that is shown now */
    show(next) {
      place = next;
      const step = count(run.stepOf(place));
      if (slider.value !== String(entry())) slider.value = String(entry());
      setAttribute(slider, "aria-valuetext", `step ${step}`);
      setText(number, step);
    },
    /**
     * @param {string} action
     * @returns {boolean} whether there was something to do
     */
    perform(action) {
      const act = actions[action];
      act?.();
      return act !== undefined;
    },
    destroy() {
      stop();
      for (const cleanup of cleanups) cleanup();
    },
  };
}
