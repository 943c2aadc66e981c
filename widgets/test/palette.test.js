import assert from "node:assert/strict";
import { test } from "node:test";
import palette from "../lmscope_widgets/palette.json" with { type: "json" };
import { contrast, parseColour } from "../src/core/colour.js";
import { makeColours, NEUTRAL_SLOT, textOn } from "../src/core/palette.js";

const READABLE = 4.5;
const THEMES = ["light", "dark"];
// What JupyterLab and VS Code lay under their outputs.
const HOSTS = [
  ["light", {}],
  ["dark", {}],
  ["light", { background: "#ffffff", ink: "#212121" }],
  ["dark", { background: "#111111", ink: "#ffffff" }],
  ["dark", { background: "#212121", ink: "#e0e0e0" }],
  ["dark", { background: "#1e1e1e", ink: "#d4d4d4" }],
];

test("all text is readable on every ground it stands on", () => {
  for (const [name, host] of HOSTS) {
    const colours = makeColours(name, host);
    const pairs = [
      ...["ink", "soft", "troubleText", "good"].map((role) => [
        role,
        colours[role],
        colours.background,
      ]),
      ...["ink", "soft"].map((role) => [`${role} raised`, colours[role], colours.raised]),
      ["trouble raised", colours.troubleText, colours.raised],
      ["trouble tint", colours.troubleText, colours.troubleTint],
      ["cursor", colours.background, colours.ink],
    ];
    for (let slot = 0; slot < 24; slot++) {
      const owner = colours.owner(slot);
      pairs.push([`ink on slot ${slot}`, colours.ink, owner.tint]);
      pairs.push([`text on hue ${slot}`, owner.onHue, owner.hue]);
    }
    const neutral = colours.owner(NEUTRAL_SLOT);
    pairs.push(["neutral", colours.ink, neutral.tint], ["on neutral", neutral.onHue, neutral.hue]);
    for (const [what, text, ground] of pairs) {
      const found = contrast(text, ground);
      assert.ok(
        found >= READABLE,
        `${name} on ${colours.background}: ${what} has ${found.toFixed(2)}`,
      );
    }
  }
});

test("surprise grounds carry their own readable text", () => {
  for (const name of THEMES) {
    palette.surprise[name].forEach((ground, k) => {
      const under = ground === "transparent" ? palette[name].background : ground;
      assert.ok(contrast(palette.surprise[`${name}_text`][k], under) >= READABLE, `${name} ${k}`);
    });
  }
});

// Machado, Oliveira and Fernandes 2009, severity 1, on linear sRGB.
const EYES = {
  normal: [
    [1, 0, 0],
    [0, 1, 0],
    [0, 0, 1],
  ],
  deutan: [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.01182, 0.04294, 0.968881],
  ],
  protan: [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
  ],
  tritan: [
    [1.255528, -0.076749, -0.178779],
    [-0.078411, 0.930809, 0.147602],
    [0.004733, 0.691367, 0.3039],
  ],
};
const LEAST = {
  light: { normal: 16, deutan: 11, protan: 8.9, tritan: 7 },
  dark: { normal: 13, deutan: 11, protan: 10, tritan: 11 },
};

const times = (matrix, vector) =>
  matrix.map((line) => line.reduce((sum, value, k) => sum + value * vector[k], 0));

function oklab(colour, eye) {
  const linear = parseColour(colour).map((value) => {
    const v = value / 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  });
  const seen = times(EYES[eye], linear).map((value) => Math.max(0, Math.min(1, value)));
  const cones = times(
    [
      [0.4122214708, 0.5363325363, 0.0514459929],
      [0.2119034982, 0.6806995451, 0.1073969566],
      [0.0883024619, 0.2817188376, 0.6299787005],
    ],
    seen,
  ).map(Math.cbrt);
  return times(
    [
      [0.2104542553, 0.793617785, -0.0040720468],
      [1.9779984951, -2.428592205, 0.4505937099],
      [0.0259040371, 0.7827717662, -0.808675766],
    ],
    cones,
  );
}

test("owners and trouble stay apart for all eyes", () => {
  for (const name of THEMES) {
    const colours = makeColours(name);
    const all = [0, 1, 2, 3, 4, 5, 6, 7]
      .map((slot) => colours.owner(slot).hue)
      .concat(colours.trouble);
    for (const [eye, least] of Object.entries(LEAST[name])) {
      const seen = all.map((colour) => oklab(colour, eye));
      for (let a = 0; a < seen.length; a++) {
        for (let b = 0; b < a; b++) {
          const apart = 100 * Math.hypot(...seen[a].map((value, k) => value - seen[b][k]));
          assert.ok(
            apart >= least,
            `${name} ${eye}: ${all[a]} and ${all[b]} are ${apart.toFixed(2)} apart`,
          );
        }
      }
    }
  }
});

test("eight hues, then stripes, then dots, then grey", () => {
  const colours = makeColours("light");
  assert.equal(new Set([0, 1, 2, 3, 4, 5, 6, 7].map((slot) => colours.owner(slot).hue)).size, 8);
  assert.deepEqual(
    [0, 8, 16, NEUTRAL_SLOT].map((slot) => colours.owner(slot).pattern),
    ["solid", "stripes", "dots", "dots"].slice(0, 3).concat("solid"),
  );
  assert.equal(colours.owner(8).hue, colours.owner(0).hue);
  assert.notEqual(colours.owner(8).small, colours.owner(0).small);
  for (const slot of [24, 100, NEUTRAL_SLOT])
    assert.equal(colours.owner(slot).hue, palette.owners.neutral.light);
});

test("the neutral request that is pointed at takes a hue", () => {
  const colours = makeColours("dark");
  assert.ok(Object.values(palette.owners.dark).includes(colours.owner(NEUTRAL_SLOT, "r99").hue));
});

test("pale owners get a darker edge that reads as a line", () => {
  const colours = makeColours("light");
  for (let slot = 0; slot < 8; slot++) {
    const { hue, edge } = colours.owner(slot);
    if (contrast(hue, colours.background) < 2.5)
      assert.ok(contrast(edge, colours.background) > 2.5, hue);
    else assert.equal(edge, hue);
  }
});

test("colours of the host are read in the forms browsers give", () => {
  assert.deepEqual(parseColour("#fff"), [255, 255, 255]);
  assert.deepEqual(parseColour("rgb(17, 34, 51)"), [17, 34, 51]);
  assert.deepEqual(parseColour("rgba(0, 0, 0, 0.5)", [255, 255, 255]), [128, 128, 128]);
  assert.deepEqual(parseColour("rgb(0 0 0 / 50%)", [255, 255, 255]), [128, 128, 128]);
  assert.equal(parseColour("rgba(0, 0, 0, 0)"), null);
  assert.equal(parseColour("var(--x)"), null);
  assert.equal(textOn("#000000"), "#FFFFFF");
});

test("tokens read on each of the five grounds, and darker means more surprising", () => {
  for (const name of ["light", "dark"]) {
    for (const host of [
      {},
      name === "light"
        ? { background: "#ffffff", ink: "#333333" }
        : { background: "#212121", ink: "#eeeeee" },
    ]) {
      const { surprise, background, ink } = makeColours(name, host);
      assert.equal(surprise.length, 5);
      assert.equal(surprise[0].ground, "transparent");
      const distances = surprise.slice(1).map(({ ground, text }) => {
        assert.ok(contrast(ground, text) >= 4.5, `${name}: ${text} on ${ground}`);
        return contrast(ground, background);
      });
      assert.deepEqual(
        distances,
        [...distances].sort((a, b) => a - b),
      );
      assert.ok(contrast(ink, background) >= 4.5);
    }
  }
});
