"use strict";

// Two plans of one tree, one above the other: frames mark the nodes that they read differently.
page.panel({
  name: "differences",
  title: "Differences",
  lead:
    "Both drawings show the tree, coloured by the groups of each plan. " +
    "A frame marks a node that the plans read differently: with other rows, in other pieces, or with other nodes.",
  shows: (data) => Boolean(data.differs),
  draw: (host) => {
    const { data, element, format } = page;
    const words = element("ul", { class: "words" }, ...data.words.map((line) => element("li", {}, line)));
    const draws = data.strategies.map((strategy) => {
      const half = element("div", { class: "half" }, element("h3", {}, headingOf(strategy)));
      host.append(half);
      return icicle(half, data.drawing, {
        label: `The tree with the groups of ${strategy.summary}. Arrow keys walk it.`,
        height: host.clientWidth < 560 ? 260 : 330,
        layer: () => groupLayer(strategy),
        marked: (mark) => data.differs[mark] > 0,
        lines: (mark) => [...readLines(strategy, mark), ...differenceLines(mark)],
      });
    });
    const { shape, target } = data;
    const heads = `${shape.num_qo_heads} query heads over ${shape.num_kv_heads} KV heads`;
    const conditions = `${heads}, head dim ${shape.head_dim}, ${shape.dtype}. Target ${target}.`;
    host.append(words, element("p", { class: "note" }, `Attention of one layer: ${conditions}`));
    return () => draws.forEach((draw) => draw());

    function headingOf(strategy) {
      const { counts, estimate, summary } = strategy;
      return `${summary}: ${format.counted(counts.groups, "group")}, ${format.time(estimate.time_us)}`;
    }

    function differenceLines(mark) {
      const number = data.differs[mark];
      if (!number) return [["plans", "read it alike"]];
      return [["plans", data.drawing.marks.nodes[mark] > 1 ? `read ${number} differently` : "read it differently"]];
    }
  },
});
