"use strict";

// The tree as an icicle: tokens to the right, rows downward, so the area of a box is tokens times rows that see them.
page.panel({
  name: "tree",
  title: "Tree",
  lead:
    "Each box is a node: its width is the tokens it adds, its height the rows that share them. " +
    "Select a box to enlarge it. Arrow keys walk the tree, Enter enlarges, Escape goes back.",
  shows: (data) => Boolean(data.drawing),
  draw: (host) =>
    icicle(host, page.data.drawing, { label: "The tree: nodes as boxes of tokens and rows", layer: () => null }),
});
