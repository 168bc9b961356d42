"use strict";

// The tree as an icicle, coloured by the groups of the strategy that is shown.
page.panel({
  name: "tree",
  title: "Tree",
  lead:
    "Each box is a node: its width is the tokens that it adds, its height the rows that share them. " +
    "Colours are groups of the plan (g), which read KV together. Colours side by side are pieces of a node; " +
    "colours one above the other read the same tokens, once each.",
  shows: (data) => Boolean(data.drawing),
  draw: (host) => {
    const { data, element, format } = page;
    const draw = icicle(host, data.drawing, {
      label: "The tree: nodes as boxes of tokens and rows, coloured by group. Arrow keys walk it.",
      layer: () => groupLayer(page.strategy),
      lines: (mark) => readLines(page.strategy, mark),
    });
    const notes = element("p", { class: "note" });
    host.append(notes);
    notes.textContent = noteText();
    return draw;

    function noteText() {
      const { marks, hidden_tokens: hidden } = data.drawing;
      const folded = marks.nodes.filter((number) => number > 1);
      const parts = ["Arrow keys walk the tree, Enter enlarges a node, Escape goes back."];
      if (folded.length) {
        const nodes = format.count(d3.sum(folded));
        parts.push(`Too small to draw: ${nodes} nodes, folded into ${format.count(folded.length)} hatched boxes.`);
      }
      const without = data.tree ? data.tree.nodes - nodesWhere(marks, () => true) : 0;
      if (without > 0) {
        const have = without === 1 ? "node has" : "nodes have";
        parts.push(`${format.count(without)} ${have} no token that a row sees, and so no box.`);
      }
      if (hidden)
        parts.push(`${format.counted(hidden, "token")} that no row sees ${hidden === 1 ? "is" : "are"} left out.`);
      return parts.join(" ");
    }
  },
});
