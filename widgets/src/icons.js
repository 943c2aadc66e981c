// @ts-check
/**
 * Shapes in a square of 16: symbol glyphs are missing in common fonts.
 */
export const ICONS = {
  first: "M2 2h2v12H2zM14 2v12L5 8z",
  back: "M12 2v12L4 8z",
  play: "M4 2l10 6-10 6z",
  pause: "M3 2h4v12H3zM9 2h4v12H9z",
  forward: "M4 2v12l8-6z",
  to: "M2 7h7V3l5 5-5 5V9H2zM14 3h1.600v10H14z",
  last: "M12 2h2v12h-2zM2 2v12l9-6z",
  event: "M3 1h1.600v14H3zM5 2h9l-3 3.500L14 9H5z",
  tables: "M1 2h14v12H1zM2.500 6v2h4V6zM8 6v2h5.500V6zM2.500 9.500v3h4v-3zM8 9.500v3h5.500v-3z",
  running: "M8 3.500a4.500 4.500 0 1 0 .01 0z",
  waiting: "M8 3.500a4.500 4.500 0 1 0 .01 0zM8 5a3 3 0 1 1-.01 0z",
  preempted: "M2.500 4h11L8 13z",
  finished: "M4 4h8v8H4z",
};
