import assert from "node:assert/strict";
import { test } from "node:test";
import { Picture } from "../src/core/picture.js";
import { Reel } from "../src/core/reel.js";
import { columns, delta, full, NULL_BLOCK, pictureOf, randomRun } from "./frames.js";

function reelOf(frames, mostBytes) {
  const reel = new Reel(mostBytes);
  const picture = new Picture();
  for (const frame of frames) {
    assert.equal(picture.apply(frame, columns(frame)), "applied");
    reel.push(frame, columns(frame), picture);
  }
  return { reel, picture };
}

const contents = ({ rows, state, cells }) => [
  [...rows.values()].sort((a, b) => (a.id < b.id ? -1 : 1)),
  [...state],
  [...cells.values()].sort((a, b) => a[0] - b[0]),
];

test("any step that had a frame can be looked at, in any order", () => {
  const { fulls, deltas } = randomRun(4, { steps: 150 });
  const { reel, picture } = reelOf(deltas);
  const last = contents(picture);
  for (const step of [149, 3, 4, 60, 70, 64, 63, 128, 0, 149]) {
    const found = reel.pictureOf(step);
    assert.equal(found.step, step);
    const truth = pictureOf({ ...fulls[step], seq: 0 });
    assert.deepEqual(contents(found), contents(truth), `step ${step}`);
  }
  assert.deepEqual(contents(picture), last, "the live picture is not touched");
});

test("a step without a frame has the picture of the one before it", () => {
  const { reel } = reelOf([
    full([NULL_BLOCK], { step: 3 }),
    delta([], { seq: 1, step: 4 }),
    delta([], { seq: 2, step: 9 }),
  ]);
  assert.deepEqual(
    [3, 4, 7, 9, 99].map((step) => reel.pictureOf(step).step),
    [3, 4, 4, 9, 9],
  );
  assert.equal(reel.pictureOf(2), null);
});

test("of several frames of a step the last one counts", () => {
  const { reel } = reelOf([
    full([NULL_BLOCK], { step: 1 }),
    delta([], { seq: 1, step: 1, note: "later" }),
    delta([], { seq: 2, step: 2 }),
  ]);
  assert.equal(reel.pictureOf(1).note, "later");
});

test("memory is bounded: the oldest goes first, the newest stays", () => {
  const { deltas } = randomRun(4, { steps: 400 });
  const { reel } = reelOf(deltas, 200_000);
  assert.ok(reel.bytes <= 200_000 && reel.stretches.length > 1);
  assert.ok(reel.firstStep > 100);
  assert.equal(reel.pictureOf(5), null);
  assert.equal(reel.pictureOf(399).step, 399);
});

test("a run that begins anew ends what there was", () => {
  const { reel } = reelOf([
    full([NULL_BLOCK], { step: 8 }),
    full([NULL_BLOCK], { epoch: 2, seq: 0, step: 0 }),
  ]);
  assert.equal(reel.firstStep, 0);
});
