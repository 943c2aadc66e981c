import assert from "node:assert/strict";
import { test } from "node:test";
import { count, decimal, fragments, percent, plural, visible } from "../src/core/format.js";

test("hidden characters are shown by name", () => {
  assert.equal(visible("a\nb\tc\r"), "a\\nb\\tc\\r");
  assert.equal(visible("\u0000\u001b[31m\u007f"), "<0x00><0x1B>[31m<0x7F>");
  assert.equal(visible("\u202eevil\u202c"), "<U+202E>evil<U+202C>");
  assert.equal(visible("\u2066a\u2069\u061c\u200f"), "<U+2066>a<U+2069><U+061C><U+200F>");
  assert.equal(visible("a\u200bb\u2060c\ufeff\u00ad"), "a<U+200B>b<U+2060>c<U+FEFF><0xAD>");
  assert.equal(visible("\u2028\u2029\u0085"), "<U+2028><U+2029><0x85>");
  assert.equal(visible("\ud800 \udc00"), "<U+D800> <U+DC00>");
  assert.equal(visible("\u{e0041}\ufffd\u3164"), "<U+E0041><U+FFFD><U+3164>");
});

test("letters of all scripts and joined emoji stay as they are", () => {
  for (const text of [
    "naïve – “quotes”",
    "日本語",
    "שלום",
    "e\u0301",
    "\u{1f468}\u200d\u{1f469}\u200d\u{1f467}",
    "\u2764\ufe0f\u200d\u{1f525}",
    "\u{1f44d}\u{1f3fd}",
  ]) {
    assert.equal(visible(text), text);
  }
  assert.equal(visible("a\u200db"), "a<U+200D>b");
});

test("fragments keep all of the text in order", () => {
  assert.deepEqual(fragments("a\u0007<b>"), [
    { text: "a", escaped: false },
    { text: "<0x07>", escaped: true },
    { text: "<b>", escaped: false },
  ]);
  assert.deepEqual(fragments(""), []);
});

test("numbers: thousands apart, a dash for what is missing", () => {
  assert.equal(count(1234567), "1,234,567");
  assert.equal(count(999), "999");
  assert.equal(count(null), "–");
  assert.equal(decimal(Number.NaN, 1), "–");
  assert.equal(percent(1, 3), "33 %");
  assert.equal(percent(0, 0), "–");
  assert.equal(plural(1, "block"), "1 block");
  assert.equal(plural(2000, "block"), "2,000 blocks");
});
