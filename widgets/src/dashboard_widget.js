// @ts-check
/**
 * The dashboard as an anywidget: frames come as messages, acknowledgements and commands go back.
 */
import { createCommands, createLiveControls } from "./commands.js";
import { columnsFromBuffers } from "./core/columns.js";
import { History } from "./core/history.js";
import { Picture } from "./core/picture.js";
import { createDashboard } from "./dashboard.js";

/** @typedef {import("./core/picture.js").Frame} Frame */

/**
 * The part of anywidget's model that is used here.
 * @typedef {object} Model
 * @property {(name: string) => any} get
 * @property {(event: string, listener: (...values: any[]) => void) => void} on
 * @property {(event: string, listener: (...values: any[]) => void) => void} off
 * @property {(message: unknown) => void} send
 */

/** @typedef {{frames: number, drawn: number, seq: number, gaps: number, errors: string[]}} Counts */

const RESYNC_AGAIN_MS = 1000;
const MOST_ERRORS = 20;

/**
 * @param {{model: Model, el: HTMLElement}} given
 * @returns {() => void}
 */
function render({ model, el }) {
  /** @type {Counts} */
  const counts = { frames: 0, drawn: 0, seq: -1, gaps: 0, errors: [] };
  const picture = new Picture();
  const history = new History();
  let isVisible = true;
  let isWaitingForFull = false;
  let lastResync = 0;
  /** @type {number | null} */
  let frame = null;

  const commands = createCommands(
    (message) => model.send(message),
    (words) => dashboard.setSay(words),
  );
  const dashboard = createDashboard(el, {
    theme: model.get("theme") ?? "auto",
    title: model.get("title") ?? "",
    height: model.get("height") ?? 0,
    views: model.get("views") ?? [],
    isLive: true,
    onAction: (action) => controls.perform(action),
  });
  const buttons = document.createElement("span");
  dashboard.helpButton.before(buttons);
  const controls = createLiveControls(buttons, (op) => commands.send(op));
  controls.allow(model.get("commands") ?? []);

  /** @param {unknown} error */
  function report(error) {
    const words = error instanceof Error ? error.message : String(error);
    counts.errors.push(words);
    counts.errors.splice(0, counts.errors.length - MOST_ERRORS);
    dashboard.setTrouble(words);
  }

  function isHidden() {
    return document.hidden || !isVisible;
  }

  function acknowledge() {
    model.send({ k: "ack", seq: picture.seq, hidden: isHidden(), epoch: picture.epoch });
  }

  function askForAll() {
    isWaitingForFull = true;
    if (Date.now() - lastResync < RESYNC_AGAIN_MS) return;
    lastResync = Date.now();
    model.send({ k: "resync" });
  }

  function draw() {
    frame = null;
    try {
      dashboard.update({ picture, history, cursor: history.length - 1 });
      counts.drawn++;
    } catch (error) {
      report(error);
    }
    acknowledge();
  }

  /**
   * @param {Frame} message
   * @param {(DataView | ArrayBuffer)[]} buffers
   */
  function take(message, buffers) {
    const result = picture.apply(message, columnsFromBuffers(message, buffers));
    if (result === "gap") {
      if (!isWaitingForFull) counts.gaps++;
      askForAll();
      return;
    }
    if (result === "old") return;
    if (message.k === "full") {
      isWaitingForFull = false;
      lastResync = 0;
    }
    history.record(picture);
    controls.show(picture.phase);
    counts.frames++;
    counts.seq = picture.seq;
    // A hidden page gets no animation frames; it keeps the picture and says so.
    if (isHidden()) acknowledge();
    else if (frame === null) frame = requestAnimationFrame(draw);
  }

  /**
   * @param {any} message
   * @param {(DataView | ArrayBuffer)[]} [buffers]
   */
  function onMessage(message, buffers = []) {
    try {
      if (message?.k === "full" || message?.k === "delta") take(message, buffers);
      else if (message?.k === "reply") {
        const error = commands.answer(message);
        dashboard.setTrouble(error);
      }
    } catch (error) {
      report(error);
      askForAll();
    }
  }

  function onVisible() {
    if (picture.seq < 0 || isHidden() || frame !== null) return;
    frame = requestAnimationFrame(draw);
  }

  const onTheme = () => dashboard.setTheme(model.get("theme") ?? "auto");
  const onViews = () => dashboard.setViews(model.get("views") ?? []);
  const onCommands = () => controls.allow(model.get("commands") ?? []);
  const onGone = () => dashboard.setGone();
  model.on("msg:custom", onMessage);
  model.on("change:theme", onTheme);
  model.on("change:views", onViews);
  model.on("change:commands", onCommands);
  model.on("comm_live_update", onGone);
  model.on("destroy", onGone);
  document.addEventListener("visibilitychange", onVisible);
  /** @type {IntersectionObserver | null} */
  let observer = null;
  if (globalThis.IntersectionObserver) {
    observer = new IntersectionObserver((entries) => {
      isVisible = entries[entries.length - 1].isIntersecting;
      onVisible();
    });
    observer.observe(dashboard.root);
  }

  const handle = Object.assign(el, { lmscopeTest: counts });
  const views = viewsForTests();
  views.push(handle);
  model.send({ k: "ready" });

  return () => {
    if (frame !== null) cancelAnimationFrame(frame);
    model.off("msg:custom", onMessage);
    model.off("change:theme", onTheme);
    model.off("change:views", onViews);
    model.off("change:commands", onCommands);
    model.off("comm_live_update", onGone);
    model.off("destroy", onGone);
    document.removeEventListener("visibilitychange", onVisible);
    observer?.disconnect();
    commands.destroy();
    controls.destroy();
    dashboard.destroy();
    views.splice(views.indexOf(handle), 1);
  };
}

/**
 * The views alive in this page, for tests in a browser.
 * @returns {HTMLElement[]}
 */
function viewsForTests() {
  const page = /** @type {{__lmscope_views?: HTMLElement[]}} */ (
    /** @type {unknown} */ (globalThis)
  );
  page.__lmscope_views ??= [];
  return page.__lmscope_views;
}

export default { render };
