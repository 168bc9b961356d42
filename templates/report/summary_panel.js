"use strict";

// The tree, the choice and the strategy that is shown, in figures and in words.
page.panel({
  name: "summary",
  title: "Summary",
  shows: (data) => Boolean(data.tree && data.strategies),
  draw: (host) => {
    const { data, element, format } = page;
    const { tree, device, floor } = data;
    const sharing = tree.unique_tokens ? tree.path_tokens / tree.unique_tokens : 1;
    const figures = element("dl", { class: "figures" });
    const words = element("div", { class: "words" });
    host.append(figures, words);

    function figure(name, value, unit) {
      return element("div", {}, element("dt", {}, name), element("dd", {}, value, element("span", {}, ` ${unit}`)));
    }

    function draw() {
      const shown = page.strategy;
      const { estimate } = shown;
      figures.replaceChildren(
        figure("rows", format.count(tree.rows), "queries"),
        figure("nodes", format.count(tree.nodes), "runs of tokens"),
        figure(
          "KV, each token once",
          format.bytes(estimate.kv_unique_bytes),
          `${format.short(tree.unique_tokens)} tokens`,
        ),
        figure("sharing", page.format.fixed(sharing, 1), "rows per token"),
        figure("estimated time", format.time(estimate.time_us), `on ${device.name}`),
        figure("floor", format.time(floor.time_us), `set by ${floor.bound}`),
      );
      words.replaceChildren(
        element("p", {}, choiceText()),
        element("p", {}, shownText(shown)),
        element("p", { class: "note" }, conditions()),
        ...leftOutLines().map((line) => element("p", { class: "note" }, line)),
      );
    }

    function choiceText() {
      const index = data.best_strategy;
      const name = index === null ? data.best : data.strategies[index].summary;
      return `auto takes ${name}: ${data.best_reason}.`;
    }

    function shownText(shown) {
      const { estimate } = shown;
      const over = floor.time_us > 0 ? `, ${format.ratio(estimate.time_us / floor.time_us)} its floor` : "";
      const place = data.strategies.length > 1 ? `, number ${shown.rank} of ${data.strategies.length}` : "";
      return `Shown below: ${shown.summary}${place}, ${format.time(estimate.time_us)}${over}; ${shown.rank_reason}.`;
    }

    function conditions() {
      const { shape } = data;
      const dims = shape.head_dim === shape.head_dim_v ? shape.head_dim : `${shape.head_dim} and ${shape.head_dim_v}`;
      const assumed = data.shape_assumed ? " (assumed, no shape was given)" : "";
      const heads = `${shape.num_qo_heads} query heads over ${shape.num_kv_heads} KV heads`;
      const rates = `${format.count(device.memory_gbps)} GB/s, ${format.count(device.tensor_tflops)} TFLOP/s`;
      return (
        `Attention of one layer: ${heads}, head dim ${dims}, ${shape.dtype}${assumed}. ` +
        `Target ${device.name}: ${device.sms} SMs, ${rates}. Times are estimates of the ${data.model} cost model.`
      );
    }

    // A line for each reason; the strategies that it is about are on indented lines below it.
    function leftOutLines() {
      const lines = [];
      for (const line of data.left_out || []) {
        if (line.startsWith(" ")) lines[lines.length - 1].push(line.trim().replace(/: (.*)/, " ($1)"));
        else lines.push([`${line[0].toUpperCase()}${line.slice(1)}`]);
      }
      return lines.map(([reason, ...names]) => `${reason} ${names.join(", ")}.`);
    }

    return draw;
  },
});
