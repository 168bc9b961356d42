"use strict";

// Drawings of one group: which of its rows see which tokens, and the tiles of its work items.

// Returns a function that draws a group's rows and tokens into the host.
function groupMatrix(host) {
  const label = "Rows of the group downward, tokens that it reads to the right; hatched where a row does not see them";
  const { node: canvas, context, reset } = shapes.canvas(host, label);
  const TOP = 22;
  let edge = 46;
  let scales = null;

  canvas.addEventListener("pointermove", (event) => {
    const bounds = canvas.getBoundingClientRect();
    const segment = scales && scales.at(event.clientX - bounds.left);
    if (!segment) return page.hideTip();
    const { node, start, stop, seen } = segment;
    const rows = seen[1] > seen[0] ? `${seen[0]} to ${seen[1] - 1} of the group` : "none";
    return page.showTip(
      `node ${node}`,
      [
        ["tokens of the node", `${page.format.count(start)} to ${page.format.count(stop - 1)}`],
        ["rows that see them", rows],
      ],
      event.clientX,
      event.clientY,
    );
  });
  canvas.addEventListener("pointerleave", () => page.hideTip());

  return (strategy, group) => {
    const rows = rowsOf(group);
    const { width, height } = reset(Math.min(240, Math.max(80, TOP + 8 * rows)));
    const paint = shapes.colours();
    const tokens = tokensOf(group);
    edge = rowMargin(context, rows);
    const x = d3.scaleLinear([0, Math.max(tokens, 1)], [edge, width - 2]);
    const y = d3.scaleLinear([0, Math.max(rows, 1)], [TOP, height - 2]);
    const hidden = shapes.hatch(context, paint.faint, paint.paper);
    const bounds = [];
    const fill = paint.fill(groupColour(strategy, group.group));
    let at = 0;
    for (const segment of group.segments) {
      const left = x(at);
      at += segment.stop - segment.start;
      const wide = Math.max(x(at) - left, 0.5);
      bounds.push(x(at));
      context.fillStyle = hidden;
      context.fillRect(left, TOP, wide, height - 2 - TOP);
      const [lo, hi] = segment.seen;
      context.fillStyle = fill;
      context.fillRect(left, y(lo), wide, y(hi) - y(lo));
      if (wide > 4) {
        context.strokeStyle = paint.paper;
        context.strokeRect(left, TOP, wide, height - 2 - TOP);
      }
      context.fillStyle = paint.ink;
      const name = `n${segment.node}`;
      if (wide > context.measureText(name).width + 8) context.fillText(name, left + 4, TOP + 9);
    }
    scales = {
      at: (place) => (place < edge ? null : group.segments[d3.bisectLeft(bounds, place)]),
    };
    shapes.edges(context, x, y, { width, height, left: edge, top: TOP, paint });
  };
}

// Returns a function that draws the work items of a group as rows of tiles, with padding hatched.
function groupTiles(host) {
  const { element, format } = page;
  const MOST = 8;
  const title = element("h3", {}, "Work items and tiles");
  const list = element("div", { class: "items" });
  const note = element("p", { class: "note" });
  host.append(title, list, note);

  return (strategy, group) => {
    const { items } = strategy;
    const own = d3.range(items.group.length).filter((index) => items.group[index] === group.group);
    const heads = page.data.shape.num_qo_heads / page.data.shape.num_kv_heads;
    const drawn = own.slice(0, MOST).map((index) => workOf(strategy, index, heads));
    const widest = d3.max(drawn, (item) => item.capacity) || 1;
    const colour = groupColour(strategy, group.group);
    list.replaceChildren(...drawn.map((item) => itemElement(item, widest, colour)));
    const left = own.length - drawn.length;
    const unfused = strategy.kernel_configs.every((config) => config.mask === "dense");
    note.textContent = unfused
      ? "This plan runs unfused in PyTorch: it has no tiles."
      : `${left > 0 ? `${format.counted(left, "more item")} of this group. ` : ""}` +
        `Each item runs once for each of ${format.counted(page.data.shape.num_kv_heads, "KV head")}` +
        `${drawn.some((item) => item.passes > 1) ? ", and once for each tile of its query heads" : ""}.`;
  };

  function workOf(strategy, index, heads) {
    const { items } = strategy;
    const config = strategy.kernel_configs[items.config[index]];
    const count = items.full_tiles[index] + items.packed_tiles[index];
    const headRows = items.rows[index] * heads;
    const passes = Math.max(1, Math.ceil(headRows / config.rows));
    return {
      index,
      config,
      count,
      passes,
      headRows,
      rows: items.rows[index],
      tokens: items.tokens[index],
      full: items.full_tiles[index],
      packed: items.packed_tiles[index],
      capacity: Math.max(count * config.tokens, 1),
      usedRows: headRows / (passes * config.rows),
      partial: items.partial[index],
    };
  }

  // A strip as long as the item's tiles: the coloured part is filled, the hatched part is padding.
  function itemElement(item, widest, colour) {
    const filled = item.count ? (item.usedRows * item.tokens) / item.capacity : 0;
    const strip = element("div", { class: "tiles hatched" });
    strip.style.width = `${(100 * item.capacity) / widest}%`;
    const used = element("span", { class: "used" });
    used.style.backgroundColor = `var(--fill${colour})`;
    used.style.width = `${(100 * item.tokens) / item.capacity}%`;
    used.style.height = `${100 * item.usedRows}%`;
    strip.append(used);
    if (item.count > 1 && item.count <= 64) {
      for (const tile of d3.range(1, item.count)) {
        const line = element("span", { class: "cut" });
        line.style.left = `${(100 * tile) / item.count}%`;
        strip.append(line);
      }
    }
    const kinds = [];
    if (item.full) kinds.push(`${format.count(item.full)} full`);
    if (item.packed) kinds.push(`${format.count(item.packed)} packed`);
    const result = item.partial < 0 ? "writes its rows' results" : `writes partial rows from ${item.partial} on`;
    const words =
      `${format.counted(item.rows, "row")}, ${kinds.join(" + ") || "no"} ${item.count === 1 ? "tile" : "tiles"} ` +
      `of ${item.config.rows}×${item.config.tokens}, ${format.percent(filled)} filled; ${result}`;
    tipOver(strip, "work item", () => [
      ["rows × heads of a KV head", format.count(item.headRows)],
      ["rows of a tile", format.count(item.config.rows)],
      ["tokens", `${format.count(item.tokens)} of ${format.count(item.capacity)}`],
      ["padding", format.percent(1 - filled)],
    ]);
    return element("div", { class: "item" }, strip, element("span", { class: "facts" }, words));
  }
}
