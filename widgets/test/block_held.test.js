import assert from "node:assert/strict";
import { test } from "node:test";
import { createHeldMarks } from "../src/block_held.js";
import { columns, delta, full, NULL_BLOCK, pictureOf, row } from "./frames.js";

const HIT_BLOCK = [0, 0x11, 1, 4];
const EVICTED_BLOCK = [0, 0x21, 1, 4];
const QUIET = [0, 0x01, 1, 4];

function marks() {
  let now = 0;
  let redraws = 0;
  const held = createHeldMarks(
    () => {
      redraws++;
    },
    () => now,
  );
  return {
    held,
    redraws: () => redraws,
    at: (ms) => {
      now = ms;
    },
  };
}

const shown = (held, id) => {
  const { isHit, isEvicted, was } = held.add({ id, isHit: false, isEvicted: false, was: "" });
  return [isHit, isEvicted, was];
};

test("news of a live engine stays 200 ms although the step after it has none", (t) => {
  t.after(() => held.destroy());
  const { held, at } = marks();
  const picture = pictureOf(
    full([NULL_BLOCK, HIT_BLOCK, EVICTED_BLOCK], {
      rows: [row("a")],
      cells: [[2, ["a"], "new", null, "old", null]],
    }),
  );
  const tracker = picture.track();
  held.note(picture, { ...tracker.take(), blocks: new Set([1, 2]) });
  const next = delta(
    [
      [1, QUIET],
      [2, QUIET],
    ],
    { seq: 1, step: picture.step + 1 },
  );
  assert.equal(picture.apply(next, columns(next)), "applied");
  at(20);
  held.note(picture, tracker.take());

  at(199);
  assert.deepEqual(held.takeEnded(), []);
  assert.deepEqual(shown(held, 1), [true, false, ""]);
  assert.deepEqual(shown(held, 2), [false, true, "old"]);
  at(200);
  assert.deepEqual(held.takeEnded(), [1, 2]);
  assert.deepEqual(shown(held, 1), [false, false, ""]);
});

test("another picture, or an earlier step, shows no news of the one before", (t) => {
  t.after(() => held.destroy());
  const { held } = marks();
  const picture = pictureOf(full([NULL_BLOCK, HIT_BLOCK], { step: 7 }));
  const news = { all: false, blocks: new Set([1]), rows: new Set(), list: false };
  held.note(picture, news);
  assert.deepEqual(shown(held, 1), [true, false, ""]);

  const earlier = pictureOf(full([NULL_BLOCK, QUIET], { step: 6 }));
  held.note(earlier, { ...news, blocks: new Set() });
  assert.deepEqual(shown(held, 1), [false, false, ""]);
});

test("marks end by themselves, with one redraw, and not after the view", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { held, at, redraws } = marks();
  const picture = pictureOf(full([NULL_BLOCK, HIT_BLOCK]));
  const news = { all: false, blocks: new Set([1]), rows: new Set(), list: false };
  held.note(picture, news);
  at(200);
  t.mock.timers.tick(200);
  assert.equal(redraws(), 1);
  held.takeEnded();

  held.note(picture, news);
  held.destroy();
  t.mock.timers.tick(1000);
  assert.equal(redraws(), 1);
});
