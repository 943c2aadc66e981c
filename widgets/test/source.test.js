import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("..", import.meta.url));
const STATIC = join(ROOT, "lmscope_widgets", "static");
const BUNDLES = ["dashboard.css", "dashboard_widget.js", "page.js"];
const MARKUP =
  /\b(innerHTML|outerHTML|insertAdjacentHTML|setHTMLUnsafe|createContextualFragment|document\.write(ln)?|DOMParser)\b/;

const sources = readdirSync(join(ROOT, "src"), { recursive: true })
  .filter((name) => name.endsWith(".js"))
  .map((name) => [name, readFileSync(join(ROOT, "src", name), "utf8")]);

test("no source makes markup from strings", () => {
  assert.ok(sources.length > 20);
  for (const [name, text] of sources) assert.doesNotMatch(text, MARKUP, name);
});

test("every source is type checked", () => {
  for (const [name, text] of sources) assert.ok(text.startsWith("// @ts-check\n"), name);
});

test("the bundles fit in a page and reach for nothing outside of it", () => {
  for (const name of BUNDLES) {
    const text = readFileSync(join(STATIC, name), "utf8");
    assert.doesNotMatch(text, /<\/(script|style)|<!--/i, name);
    const addresses = text.match(/\b(https?|wss?):\/\/[^"'`)\s]+/g) ?? [];
    assert.deepEqual(
      [...new Set(addresses)].filter((address) => address !== "http://www.w3.org/2000/svg"),
      [],
      name,
    );
    assert.doesNotMatch(
      text,
      /\b(fetch|XMLHttpRequest|WebSocket|EventSource|importScripts|eval)\s*\(|url\(|@import|\bimport\s*\(/,
      name,
    );
  }
});

test("the committed bundles are what the sources build", () => {
  const out = mkdtempSync(join(tmpdir(), "lmscope-bundles-"));
  try {
    execFileSync("npm", ["run", "--silent", "build"], {
      cwd: ROOT,
      env: { ...process.env, OUTDIR: out },
      stdio: "pipe",
    });
    assert.deepEqual(readdirSync(out).sort(), BUNDLES);
    for (const name of BUNDLES) {
      assert.equal(
        readFileSync(join(out, name), "utf8"),
        readFileSync(join(STATIC, name), "utf8"),
        `${name} is stale: npm run build`,
      );
    }
  } finally {
    rmSync(out, { recursive: true });
  }
});

test("the lock file names no registry", () => {
  assert.doesNotMatch(readFileSync(join(ROOT, "package-lock.json"), "utf8"), /"resolved"/);
});
