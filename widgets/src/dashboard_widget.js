// @ts-check
/**
 * The dashboard as an anywidget: frames come as messages, acknowledgements and commands go back.
 */
import { createCommands, createLiveActions, createLiveControls } from "./commands.js";
import { h } from "./core/dom.js";
import { Stream } from "./core/stream.js";
import { createDashboard } from "./dashboard.js";
import { createLookingBack } from "./looking_back.js";

/**
 * The part of anywidget's model that is used here.
 * @typedef {object} Model
 * @property {(name: string) => any} get
 * @property {(event: string, listener: (...values: any[]) => void) => void} on
 * @property {(event: string, listener: (...values: any[]) => void) => void} off
 * @property {(message: any) => void} send
 */

/** anywidget calls this once for each model; views of a model come and go. */
export default function createWidget() {
  /** @type {Stream | null} */
  let stream = null;
  /** @type {Map<HTMLElement, () => void>} */
  const views = new Map();

  /** @param {HTMLElement} el */
  function end(el) {
    const cleanup = views.get(el);
    views.delete(el);
    cleanup?.();
  }

  return {
    /** @param {{model: Model}} given */
    initialize({ model }) {
      const isReplay = (model.get("steps") ?? []).length > 0;
      const made = new Stream((message) => model.send(message), { isReplay });
      stream = made;
      /** @type {(message: any, buffers?: DataView[]) => void} */
      const receive = (message, buffers) => made.receive(message, buffers);
      model.on("msg:custom", receive);
      return () => model.off("msg:custom", receive);
    },
    /** @param {{model: Model, el: HTMLElement}} given */
    render({ model, el }) {
      if (!stream) throw new Error("render comes after initialize");
      // An output that is written anew drops the element of its old view and does not say
      // so. A view that is only scrolled away keeps its parent.
      for (const earlier of [...views.keys()]) if (!earlier.parentNode) end(earlier);
      views.set(el, renderView(stream, model, el));
      return () => end(el);
    },
  };
}

/**
 * @param {Stream} stream
 * @param {Model} model
 * @param {HTMLElement} el
 * @returns {() => void}
 */
function renderView(stream, model, el) {
  /** @type {(() => void)[]} */
  const cleanups = [];
  let drawn = 0;
  let isVisible = true;
  /** @type {number | null} */
  let frame = null;

  const look = createLookingBack(stream, {
    redraw: schedule,
    seek: (step) => stream.isReplay && live.actions.send("seek", step) !== false,
  });
  const live = createLiveActions({
    act: (op, argument) => commands.send(op, argument),
    picture: () => stream.picture,
    look,
    changed: () => {
      controls.update();
      schedule();
    },
  });
  const dashboard = createDashboard(el, {
    theme: model.get("theme") ?? "auto",
    title: model.get("title") ?? "",
    height: model.get("height") ?? 0,
    views: model.get("views") ?? [],
    colour: model.get("colour") ?? "owner",
    isLive: true,
    actions: live.actions,
    onSeek: (entry) => look.goTo(entry),
    onReturn: () => look.end(),
    askWindow: (asked) => {
      commands.send("window", asked && `${asked.first}:${asked.count}`);
    },
  });
  const commands = createCommands(
    (message) => stream.send(message),
    (words) => dashboard.setSay(words),
  );
  const buttons = h("span", { class: "lms-transport" });
  dashboard.helpButton.before(buttons);
  const controls = createLiveControls(buttons, live.actions);
  allow();

  function allow() {
    live.allow(model.get("commands") ?? []);
    controls.update();
    schedule();
  }

  function schedule() {
    if (stream.picture.seq >= 0 && frame === null) frame = requestAnimationFrame(draw);
  }

  const viewer = {
    isHidden: () => document.hidden || !isVisible,
    show() {
      if (stream.picture.seq < 0) return;
      live.show(stream.picture.phase);
      controls.update(stream.picture.speed);
      if (!viewer.isHidden()) schedule();
    },
    fail: (/** @type {string} */ words) => dashboard.setTrouble(words),
    answer(/** @type {any} */ reply) {
      if (!reply.ok) live.refused();
      dashboard.setTrouble(commands.answer(reply));
      viewer.show();
    },
    gone: () => dashboard.setGone(),
  };

  function draw() {
    frame = null;
    try {
      dashboard.update({ history: stream.history, ...look.shown() });
      drawn++;
    } catch (error) {
      stream.report(error);
    }
    stream.acknowledge();
  }

  function onVisible() {
    if (stream.picture.seq >= 0) viewer.show();
  }

  /** @type {[string, () => void][]} */
  const events = [
    ["change:theme", () => dashboard.setTheme(model.get("theme") ?? "auto")],
    ["change:views", () => dashboard.setViews(model.get("views") ?? [])],
    ["change:colour", () => dashboard.setColour(model.get("colour") ?? "owner")],
    ["change:commands", allow],
    ["comm_live_update", () => dashboard.setGone()],
    ["destroy", () => dashboard.setGone()],
  ];
  for (const [name, listener] of events) {
    model.on(name, listener);
    cleanups.push(() => model.off(name, listener));
  }
  document.addEventListener("visibilitychange", onVisible);
  cleanups.push(() => document.removeEventListener("visibilitychange", onVisible));
  if (globalThis.IntersectionObserver) {
    const observer = new IntersectionObserver((entries) => {
      isVisible = entries[entries.length - 1].isIntersecting;
      onVisible();
    });
    observer.observe(dashboard.root);
    cleanups.push(() => observer.disconnect());
  }
  cleanups.push(showToTests(el, stream, () => drawn));
  cleanups.push(stream.add(viewer));
  onVisible();

  return () => {
    if (frame !== null) cancelAnimationFrame(frame);
    for (const cleanup of cleanups) cleanup();
    commands.destroy();
    controls.destroy();
    dashboard.destroy();
  };
}

/**
 * Lets a test in a browser see how far a view is: `el.lmscopeTest`, and all views of the page
 * in `__lmscope_views`.
 * @param {HTMLElement} el
 * @param {Stream} stream
 * @param {() => number} drawn
 * @returns {() => void}
 */
function showToTests(el, stream, drawn) {
  const page = /** @type {{__lmscope_views?: HTMLElement[]}} */ (
    /** @type {unknown} */ (globalThis)
  );
  page.__lmscope_views ??= [];
  const views = page.__lmscope_views;
  const lmscopeTest = {
    get frames() {
      return stream.frames;
    },
    get drawn() {
      return drawn();
    },
    get seq() {
      return stream.picture.seq;
    },
    get gaps() {
      return stream.gaps;
    },
    get errors() {
      return stream.errors;
    },
  };
  views.push(Object.assign(el, { lmscopeTest }));
  return () => {
    const place = views.indexOf(el);
    if (place >= 0) views.splice(place, 1);
  };
}
