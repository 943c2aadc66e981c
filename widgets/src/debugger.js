// @ts-check
/**
 * Where the engine stands, what it stands at, and the buttons that move it.
 */
import { h, icon, listen, setAttribute, setHidden, textNodes } from "./core/dom.js";
import { count } from "./core/format.js";
import { ICONS } from "./icons.js";
import { createStructTree } from "./struct_tree.js";

/** @typedef {import("./core/picture.js").Picture} Picture */
/** @typedef {import("./actions.js").Actions} Actions */

/** The five kinds of structs, in the order in which they cross in a step. */
export const KINDS = [
  ...["EngineCoreRequest", "SchedulerOutput", "ModelRunnerOutput", "EngineCoreOutputs"],
  "RequestOutput",
];
/** Events to break on, as Python names them, and in words. @type {[string, string][]} */
export const EVENTS = [
  ["preemption", "a preemption"],
  ["eviction", "an eviction"],
  ["prefix_hit", "a prefix hit"],
  ["first_token", "a first token"],
  ["finish", "a request that ends"],
];

/**
 * @param {HTMLElement} root  an empty element
 * @param {Actions} actions
 */
export function createDebugger(root, actions) {
  /** @type {(() => void)[]} */
  const cleanups = [];
  const button = (/** @type {string} */ className, /** @type {() => void} */ click) => {
    const element = h("button", { type: "button", class: `lms-button lms-boxed ${className}` });
    listen(cleanups, element, "click", click);
    return element;
  };
  const pause = button("lms-d-pause", () => actions.perform("play"));
  const step = button("lms-d-step", () => actions.perform("boundary"));
  const stepTo = button("lms-d-to", () => actions.stepTo(kind.value));
  const kind = h(
    "select",
    { class: "lms-select", "aria-label": "kind of struct to step to" },
    ...KINDS.map((name) => h("option", { value: name }, name)),
  );
  kind.value = "SchedulerOutput";
  const back = button("lms-d-back", () => actions.perform("boundary_back"));
  face(step, ICONS.forward, "Step", "one struct on  [.]");
  face(stepTo, ICONS.to, "Step to", "on to the next struct of this kind");
  face(back, ICONS.back, "Back", "one struct back  [,]");
  const bar = h("div", { class: "lms-dbgbar" }, pause, step, stepTo, kind, back);
  const stations = KINDS.map((name) => createStation(name, cleanups, actions));
  const line = h("div", { class: "lms-stations" }, ...stations.map((one) => one.element));
  const where = h("p", { class: "lms-where" });
  const breaks = createBreaks(actions, cleanups);
  const tree = createStructTree();
  root.append(bar, line, where, breaks.element, tree.element);
  let drawnWhere = "";

  return {
    /**
     * @param {Picture} picture
     * @param {string} phase
     * @param {boolean} [isPassing]  the engine runs and the next picture is near
     */
    update(picture, phase, isPassing = false) {
      const isPaused = actions.isPaused;
      const can = (/** @type {string} */ op) => actions.can(op);
      setHidden(pause, !can(isPaused ? "resume" : "pause"));
      face(
        pause,
        isPaused ? ICONS.play : ICONS.pause,
        actions.isReplay ? (isPaused ? "Play" : "Pause") : isPaused ? "Resume" : "Pause",
        "[Space]",
      );
      for (const one of [step, stepTo, kind]) setHidden(one, !can("step"));
      setHidden(back, !can("back"));
      setHidden(
        bar,
        [pause, step, back].every((one) => one.hidden),
      );
      for (const [k, one] of stations.entries()) one.update(k, picture, actions);
      const words = `Step ${count(picture.step)}${picture.boundary ? `, ${picture.boundary}` : ""}.`;
      const key = `${words} ${picture.where} ${phase}`;
      if (key !== drawnWhere) {
        drawnWhere = key;
        where.replaceChildren(h("b", {}, words), " ", ...textNodes(picture.where));
      }
      breaks.update(picture, actions);
      tree.update(picture.struct, isPassing);
    },
    destroy() {
      for (const cleanup of cleanups) cleanup();
      tree.destroy();
      root.replaceChildren();
    },
  };
}

/**
 * What a button shows; drawn again only when it differs.
 * @param {HTMLElement} button
 * @param {string} path
 * @param {string} words
 * @param {string} more
 */
function face(button, path, words, more) {
  const title = `${words} ${more}`;
  if (button.title === title) return;
  button.title = title;
  button.replaceChildren(icon(path), ` ${words}`);
}

/**
 * One of the five places on the line: passed, here, or to come.
 * @param {string} name
 * @param {(() => void)[]} cleanups
 * @param {Actions} actions
 */
function createStation(name, cleanups, actions) {
  const dot = h("span", { class: "lms-break-dot", hidden: true }, icon(ICONS.running));
  // Where it must break, the name breaks between its words.
  const words = name.split(/(?=[A-Z])/).flatMap((word, k) => (k ? [h("wbr"), word] : [word]));
  const element = h("button", { type: "button", class: "lms-station" }, dot, ...words);
  listen(cleanups, element, "click", () => actions.stepTo(name));
  return {
    element,
    /**
     * @param {number} place
     * @param {Picture} picture
     * @param {Actions} can
     */
    update(place, picture, can) {
      // A request enters behind the step that was last.
      const at = picture.at;
      const state = place === at ? "here" : place < at || at === 0 ? "past" : "ahead";
      setAttribute(element, "data-state", at < 0 ? "ahead" : state);
      setAttribute(element, "aria-current", String(place === at));
      const stops = picture.breaks.some(([, kind, isOn]) => isOn && kind === place);
      setHidden(dot, !stops);
      const title = [
        can.can("step") ? `on to the next ${name}` : name,
        stops ? "the engine stops here" : "",
      ];
      setAttribute(element, "title", title.filter(Boolean).join("; "));
      element.disabled = !can.can("step");
    },
  };
}

/**
 * The breakpoints, each a button that takes it away, and what else could stop the engine.
 * @param {Actions} actions
 * @param {(() => void)[]} cleanups
 */
function createBreaks(actions, cleanups) {
  const list = h("span", { class: "lms-breaks" });
  const more = h(
    "select",
    { class: "lms-select", "aria-label": "break on" },
    h("option", { value: "" }, "break on…"),
    ...EVENTS.map(([event, words]) => h("option", { value: event }, words)),
    ...KINDS.map((name) => h("option", { value: name }, `every ${name}`)),
  );
  listen(cleanups, more, "change", () => {
    if (more.value) actions.send("break", more.value);
    more.value = "";
  });
  const element = h("div", { class: "lms-breakbar" }, list, more);
  let drawn = "";
  return {
    element,
    /**
     * @param {Picture} picture
     * @param {Actions} can
     */
    update(picture, can) {
      setHidden(more, !can.can("break"));
      setHidden(element, more.hidden && !picture.breaks.length);
      const key = JSON.stringify([picture.breaks, can.can("unbreak")]);
      if (key === drawn) return;
      drawn = key;
      list.replaceChildren(
        ...picture.breaks.map(([name, kind, isOn]) => {
          const button = h(
            "button",
            {
              ...{ type: "button", class: `lms-button lms-break${isOn ? " lms-on" : ""}` },
              ...{ disabled: !can.can("unbreak"), title: "take this breakpoint away" },
            },
            icon(isOn ? ICONS.running : ICONS.waiting),
            ...textNodes(` ${breakWords(name, kind)}${isOn ? "" : ", off"}`),
          );
          button.addEventListener("click", () => actions.send("unbreak", name));
          return button;
        }),
      );
    },
  };
}

/**
 * @param {string} name  an event, with or without a request, the name of a kind, or somebody's own
 * @param {number} kind
 */
export function breakWords(name, kind) {
  const struct = KINDS[kind] ?? "";
  if (name === struct) return `every ${struct}`;
  const [event, ...request] = name.split(":");
  const words = EVENTS.find(([known]) => known === event)?.[1];
  if (words) return `on ${words}${request.length ? ` of ${request.join(":")}` : ""}`;
  return `${struct}${name ? ` if ${name}` : ""}`;
}
