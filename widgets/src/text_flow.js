// @ts-check
/**
 * The text of a request as it grows: the end of its prompt, then its output.
 */
import { h, textNodes } from "./core/dom.js";

/** @typedef {import("./core/picture.js").Row} Row */

/** Characters that a frame carries of a prompt: one that long was cut. */
const PROMPT_TAIL = 120;
/** Characters that a later one could join to what stands before them. */
const OPEN_END = /[\u200d\ufe0f\ud800-\udbff]$/;

/**
 * @param {HTMLElement} root  gets the class `lms-text`
 */
export function createTextFlow(root) {
  root.classList.add("lms-text");
  const prompt = h("span", { class: "lms-prompt" });
  const output = h("span", { class: "lms-output" });
  const end = h("span", { class: "lms-end", "aria-hidden": "true" });
  // Laid out from its end, a text that overflows shows its end and stays where a reader has
  // scrolled to, without asking for its size at every frame.
  root.append(h("div", {}, prompt, output, end));
  let shownPrompt = "";
  let shownText = "";

  /** @param {string} text */
  function setOutput(text) {
    if (text === shownText) return;
    const isLonger = text.startsWith(shownText) && !OPEN_END.test(shownText);
    const added = textNodes(isLonger ? text.slice(shownText.length) : text);
    if (!isLonger) output.replaceChildren();
    const last = output.lastChild;
    if (last?.nodeType === 3 && added[0]?.nodeType === 3) {
      last.nodeValue = (last.nodeValue ?? "") + (added.shift()?.nodeValue ?? "");
    }
    output.append(...added);
    shownText = text;
  }

  return {
    /** @param {Row} row */
    update(row) {
      const promptText = endOfPrompt(row.prompt_text);
      if (promptText !== shownPrompt) {
        prompt.replaceChildren(...textNodes(promptText));
        shownPrompt = promptText;
      }
      setOutput(row.text);
      const mark = row.state === "running" ? "caret" : row.state === "finished" ? "" : "cut";
      if (end.dataset.mark !== mark) {
        end.dataset.mark = mark;
        end.textContent = mark === "cut" ? " …" : "";
      }
    },
  };
}

/**
 * The tail of a prompt, from the first whole word on where one begins soon.
 * @param {string} tail
 */
function endOfPrompt(tail) {
  if (tail.length < PROMPT_TAIL) return tail;
  const word = tail.search(/\s\S/);
  return `… ${word >= 0 && word < 24 ? tail.slice(word + 1) : tail}`;
}
