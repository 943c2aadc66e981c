// @ts-check
/**
 * One line for what concerns the whole view: loading, finished, gone.
 */
import { h, textNodes } from "./core/dom.js";
import { count, decimal, plural } from "./core/format.js";

/** @typedef {import("./core/picture.js").Picture} Picture */

/** @param {HTMLElement} root  an empty element */
export function createBanner(root) {
  let drawn = "";
  root.hidden = true;
  return {
    /**
     * @param {Picture} picture
     * @param {{phase: string, isGone: boolean, isLive: boolean}} state
     */
    update(picture, { phase, isGone, isLive }) {
      const [strong, plain] = wordsFor(picture, phase, isGone, isLive);
      const key = `${phase} ${strong} ${plain}`;
      if (key === drawn) return;
      drawn = key;
      root.hidden = strong === "";
      root.classList.toggle("lms-trouble", phase === "dead");
      root.replaceChildren(h("b", {}, ...textNodes(strong)), h("span", {}, ...textNodes(plain)));
    },
    destroy() {
      root.replaceChildren();
    },
  };
}

/**
 * @param {Picture} picture
 * @param {string} phase
 * @param {boolean} isGone
 * @param {boolean} isLive
 * @returns {[string, string]}
 */
function wordsFor(picture, phase, isGone, isLive) {
  const { stat } = picture;
  if (isGone) {
    const words = `This is the last picture, step ${count(picture.step)}; nothing you do here reaches it.`;
    return ["The kernel has gone.", words];
  }
  if (phase === "dead")
    return ["The engine has stopped.", `This is the last picture, step ${count(picture.step)}.`];
  if (phase === "loading" && isLive)
    return [`Loading ${picture.info?.model ?? ""}`.trim(), picture.note];
  if (phase === "paused" && picture.inFlight) return ["Paused.", picture.inFlight];
  // In a page the last step is one among others, and nothing may move when it is reached.
  if (phase !== "finished" || !isLive || !stat.finished) return ["", ""];
  let lost = 0;
  for (const row of picture.rows.values()) lost += row.lost;
  const cost = stat.preemptions
    ? `, ${plural(stat.preemptions, "preemption")} gave up ${plural(lost, "computed token")}`
    : "";
  return [
    `${plural(stat.finished, "request")} finished.`,
    `${plural(picture.step, "step")} in ${decimal(picture.time, 2)} s${cost}.`,
  ];
}
