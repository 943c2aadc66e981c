// @ts-check
/**
 * A recorded run as a page: everything is in the page, nothing is fetched.
 */
import { h } from "./core/dom.js";
import { inflate } from "./core/inflate.js";
import { actionOf } from "./core/keys.js";
import { Player } from "./core/player.js";
import { createDashboard } from "./dashboard.js";
import { KINDS } from "./debugger.js";
import { createTransport } from "./transport.js";

/** @typedef {import("./core/picture.js").Frame} Frame */

const DATA_ID = "lmscope-data";
const ROOT_ID = "lmscope";

/**
 * The frames in a data element: deflated, base64.
 * @param {string} text
 * @returns {Promise<Frame[]>}
 */
export async function readFrames(text) {
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const page = await inflate(packed);
  if (page.v !== 1) throw new Error(`the page has version ${page.v}, this reader knows 1`);
  return page.frames;
}

/**
 * Builds the dashboard of a run in `root`.
 * @param {HTMLElement} root
 * @param {Frame[]} frames
 * @param {URLSearchParams} [settings]  step, theme, sel, colour
 * @param {(theme: import("./core/theme.js").Theme) => void} [onTheme]
 */
export function showRun(root, frames, settings = new URLSearchParams(), onTheme = () => {}) {
  const player = new Player(frames);
  const { history } = player;
  const asked = settings.get("theme");
  const theme = asked === "light" || asked === "dark" ? asked : "auto";

  /** @param {number} place */
  function seek(place) {
    const picture = player.seek(place);
    transport.show(player.place);
    dashboard.update({ picture, history, cursor: player.entry });
  }

  const placeOf = (/** @type {number} */ entry) => player.placeOf(history.entries[entry].step);

  /** On to the next frame at a kind of struct; to the next step where there are no such frames. */
  function stepTo(/** @type {string} */ kind) {
    transport.stop();
    const at = KINDS.indexOf(kind);
    const found = frames.findIndex((frame, place) => place > player.place && frame.at === at);
    if (found >= 0) seek(found);
    else transport.perform("forward");
  }

  const can = new Set(["pause", "resume", "step", "back"]);
  /** @type {import("./actions.js").Actions} */
  const actions = {
    get isPaused() {
      return !transport.isPlaying;
    },
    isReplay: true,
    can: (op) => can.has(op),
    perform: (action) => transport.perform(action),
    stepTo,
    send: () => {},
  };
  const dashboard = createDashboard(root, {
    theme,
    colour: settings.get("colour") === "attention" ? "attention" : "owner",
    onTheme,
    onSeek: (entry) => {
      transport.stop();
      seek(placeOf(entry));
    },
    actions,
  });
  const controls = h("span", { class: "lms-transport" });
  dashboard.helpButton.before(controls);
  const transport = createTransport(controls, {
    length: player.length,
    steps: history.length,
    seek,
    stepOf: (place) => frames[place].step,
    entryOf: (place) => history.entryOf(frames[place].step),
    placeOf,
    changed: () => dashboard.redraw(),
    nextEvent: (from, direction) => history.nextEvent(from, direction),
  });
  // Nobody has to click before the keys work: the page has nothing else to take them.
  const onKey = (/** @type {KeyboardEvent} */ event) => {
    if (event.defaultPrevented || event.target !== document.body) return;
    const action = actionOf(event);
    if (action && dashboard.perform(action)) event.preventDefault();
  };
  document.addEventListener("keydown", onKey);
  const step = settings.get("step");
  seek(step === null ? player.length - 1 : player.placeOf(Number(step)));
  const selected = settings.get("sel");
  if (selected !== null) dashboard.link.select(selected);

  return {
    player,
    dashboard,
    transport,
    seek,
    destroy() {
      document.removeEventListener("keydown", onKey);
      transport.destroy();
      dashboard.destroy();
    },
  };
}

/**
 * The page around the dashboard is of its colour.
 * @param {import("./core/theme.js").Theme} theme
 */
function paintPage({ colours }) {
  document.body.style.margin = "0";
  document.documentElement.style.background = colours.background;
  document.documentElement.style.colorScheme = colours.name;
}

async function start() {
  const data = document.getElementById(DATA_ID);
  if (!data) return;
  const root =
    document.getElementById(ROOT_ID) ?? document.body.appendChild(h("div", { id: ROOT_ID }));
  const settings = () => new URLSearchParams(location.hash.slice(1));
  try {
    const run = showRun(root, await readFrames(data.textContent ?? ""), settings(), paintPage);
    Object.assign(globalThis, { __lmscope_page: run });
    window.addEventListener("hashchange", () => {
      const step = settings().get("step");
      if (step !== null) run.seek(run.player.placeOf(Number(step)));
    });
  } catch (error) {
    const words = error instanceof Error ? error.message : String(error);
    root.replaceChildren(
      h(
        "p",
        { class: "lms-failed", role: "alert" },
        `The run in this page cannot be shown: ${words}`,
      ),
    );
  }
}

if (typeof document !== "undefined") start();
