import assert from "node:assert/strict";
import { test } from "node:test";
import { blocksOf, boxOf, itemAt, itemOf, layoutBlocks, zoomBlocks } from "../src/block_layout.js";

const WIDE = { width: 584, height: 292 };
const NARROW = { width: 347, height: 286 };

test("cells are as detailed as there is room", () => {
  const level = (count, box = WIDE) => layoutBlocks({ count, ...box }).level;
  assert.equal(level(20), "text");
  assert.equal(level(50), "text");
  assert.equal(level(50, NARROW), "name");
  assert.equal(level(600), "mark");
  assert.equal(level(4096), "mark");
  assert.equal(level(20_000), "bin");
  assert.equal(level(1_000_000), "bin");
});

test("a level is only used where its cells are large enough", () => {
  for (let count = 1; count < 3000; count = Math.ceil(count * 1.1)) {
    for (const box of [WIDE, NARROW, { width: 1000, height: 292 }]) {
      const layout = layoutBlocks({ count, ...box });
      const least = { text: 54, name: 36, mark: 2, bin: 0 }[layout.level];
      for (const item of [0, layout.items - 1]) {
        const { w, h } = boxOf(layout, item);
        assert.ok(w >= least - 1 && h >= 2, `${count}: ${layout.level} of ${w} x ${h}`);
      }
    }
  }
});

test("all cells lie in the box, whatever the number", () => {
  for (const count of [1, 2, 7, 50, 333, 2048, 9999, 200_000, 1_000_000]) {
    const layout = layoutBlocks({ count, ...WIDE });
    assert.ok(layout.height <= WIDE.height + 3, `${count}: ${layout.height}`);
    const last = boxOf(layout, layout.items - 1);
    assert.ok(last.y + last.h <= layout.height + 1 && last.x + last.w <= WIDE.width + 1);
    assert.equal(blocksOf(layout, layout.items - 1)[1], count);
    assert.ok(layout.cols * layout.rows >= layout.items);
  }
});

test("larger text needs larger cells for the same level", () => {
  assert.equal(layoutBlocks({ count: 50, ...WIDE, textSize: 18 }).level, "name");
});

test("a point finds the block that is drawn there, and no other", () => {
  for (const count of [50, 600, 20_000]) {
    const layout = layoutBlocks({ first: 0, count, ...WIDE });
    for (let item = 0; item < layout.items; item += 7) {
      const { x, y, w, h } = boxOf(layout, item);
      for (const [px, py] of [
        [x + 1, y + 1],
        [x + w - 1, y + h - 1],
        [x + w / 2, y + h / 2],
      ]) {
        assert.equal(itemAt(layout, px, py), item, `${count} blocks, cell ${item}`);
      }
      const [from, to] = blocksOf(layout, item);
      assert.equal(itemOf(layout, from), item);
      assert.equal(itemOf(layout, to - 1), item);
    }
    assert.equal(itemAt(layout, -1, 5), null);
    assert.equal(itemAt(layout, 5, layout.height + 40), null);
  }
});

test("zooming holds the block under the pointer and ends at cells with names", () => {
  const total = 20_000;
  let shown = { first: 0, count: total };
  let layout = layoutBlocks({ ...shown, ...WIDE });
  const at = { x: 300, y: 150 };
  const block = blocksOf(layout, itemAt(layout, at.x, at.y))[0];
  for (let k = 0; k < 40; k++) {
    const next = zoomBlocks(layout, { ...at, factor: 1 / 1.5, total, height: WIDE.height });
    if (!next) break;
    shown = next;
    layout = layoutBlocks({ ...shown, ...WIDE });
    assert.ok(shown.first >= 0 && shown.first + shown.count <= total);
    const [from, to] = blocksOf(layout, itemAt(layout, at.x, Math.min(at.y, layout.height - 1)));
    assert.ok(
      Math.abs(from - block) <= 60 || (block >= from && block < to),
      `${block} is not near ${from}`,
    );
  }
  assert.equal(layout.level, "text");
  assert.equal(shown.count, 24);
  for (let k = 0; k < 40; k++) {
    const next = zoomBlocks(layout, { ...at, factor: 1.5, total, height: WIDE.height });
    if (!next) break;
    layout = layoutBlocks({ ...next, ...WIDE });
  }
  assert.equal(layout.count, total);
});
