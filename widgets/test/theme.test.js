import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { applyTheme, watchTheme } from "../src/core/theme.js";
import { openPage } from "./page.js";

let page;
beforeEach(() => {
  page = openPage();
});
afterEach(() => page.close());

function jupyterLab(isLight) {
  const { body, documentElement } = page.document;
  body.dataset.jpThemeLight = String(isLight);
  documentElement.style.setProperty("--jp-layout-color1", isLight ? "#ffffff" : "#212121");
  documentElement.style.setProperty("--jp-ui-font-color1", isLight ? "#333333" : "#eeeeee");
}

function rootInPage() {
  const root = page.document.createElement("div");
  page.document.body.append(root);
  return root;
}

test("JupyterLab's theme, background and ink are taken", () => {
  jupyterLab(false);
  const { colours } = applyTheme(rootInPage(), "auto", 12);
  assert.deepEqual([colours.name, colours.background, colours.ink], ["dark", "#212121", "#eeeeee"]);
});

test("a view that is not in the page yet has the page's theme all the same", () => {
  jupyterLab(false);
  const root = page.document.createElement("div");
  assert.equal(applyTheme(root, "auto", 12).colours.background, "#212121");
  assert.equal(root.style.getPropertyValue("--lms-background"), "#212121");
  assert.equal(root.dataset.theme, "dark");
});

test("a forced theme that is not the host's stands on its own background", () => {
  jupyterLab(true);
  const { colours } = applyTheme(rootInPage(), "dark", 12);
  assert.deepEqual([colours.name, colours.background], ["dark", "#16191D"]);
});

test("VS Code's background tells light from dark", () => {
  page.document.documentElement.style.setProperty("--vscode-editor-background", "#1e1e1e");
  assert.equal(applyTheme(rootInPage(), "auto", 12).colours.name, "dark");
});

test("without a host the system's preference decides", () => {
  page.window.matchMedia = () => ({ matches: true });
  assert.equal(applyTheme(rootInPage(), "auto", 12).colours.name, "dark");
  page.window.matchMedia = () => ({ matches: false });
  assert.equal(applyTheme(rootInPage(), "auto", 12).colours.name, "light");
});

test("a change of theme is told until it is no longer wanted", async () => {
  let told = 0;
  const end = watchTheme(() => told++);
  page.document.body.dataset.jpThemeName = "other";
  await page.window.happyDOM.waitUntilComplete();
  assert.equal(told, 1);
  end();
  page.document.body.dataset.jpThemeName = "third";
  await page.window.happyDOM.waitUntilComplete();
  assert.equal(told, 1);
});
