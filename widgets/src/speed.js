// @ts-check
/**
 * How fast a recorded run is played.
 */
import { h } from "./core/dom.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];

/** @param {(speed: number) => void} choose */
export function createSpeed(choose) {
  const element = h(
    "select",
    { class: "lms-select lms-speed", "aria-label": "speed", title: "speed" },
    ...SPEEDS.map((speed) => option(speed)),
  );
  element.value = "1";
  element.addEventListener("change", () => choose(Number(element.value)));
  return {
    element,
    /** @param {number} speed  another one than those listed is listed, too */
    show(speed) {
      if (Number(element.value) === speed) return;
      const known = [...element.options].some((one) => Number(one.value) === speed);
      if (!known) element.append(option(speed));
      element.value = String(speed);
    },
  };
}

/** @param {number} speed */
function option(speed) {
  return h("option", { value: speed }, `× ${speed}`);
}
