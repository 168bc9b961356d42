"use strict";

// Groups of the plan: the rows and runs of KV of one of them, its work items and their padding, and who merges.
page.panel({
  name: "plan",
  title: "Plan",
  lead:
    "A group is a set of rows that read the same KV together. Select one to see which rows see which tokens, " +
    "and how thread blocks divide the work into tiles. Hatched areas are read or computed for nothing.",
  shows: (data) => (data.strategies || []).length > 0,
  draw: (host) => {
    const { element, format } = page;
    const facts = element("p", { class: "note" });
    const list = element("div", { class: "groups", role: "listbox", tabindex: 0, "aria-label": "Groups" });
    const detail = element("div", { class: "detail" });
    const repeats = element("div", {});
    host.append(facts, element("div", { class: "columns" }, list, detail), repeats);
    const title = element("h3", {});
    const text = element("p", { class: "note" });
    detail.append(title, text);
    const matrix = groupMatrix(detail);
    const tiles = groupTiles(detail);
    let shown = null; // the strategy whose groups are listed
    let chosen = 0; // the place of the group in the list

    list.addEventListener("keydown", (event) => {
      const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
      if (!(event.key in steps)) return;
      event.preventDefault();
      choose(Math.max(0, Math.min(shown.groups.length - 1, chosen + steps[event.key])));
    });

    function draw() {
      if (shown !== page.strategy) {
        shown = page.strategy;
        fill();
      }
      choose(chosen);
      repeats.replaceChildren(...repeatedReads(shown));
    }

    function fill() {
      chosen = 0;
      const { counts } = shown;
      const left = counts.groups - shown.groups.length;
      const merged = counts.partial_rows
        ? `${format.counted(counts.partial_rows, "partial row")}, merged by ${shown.merged_by}`
        : "every row is finished by one item, so nothing is merged";
      facts.textContent =
        `${shown.summary}: ${format.counted(counts.groups, "group")}, ${format.counted(counts.segments, "segment")}, ` +
        `${itemsText()}; ${merged}.` +
        (left ? ` The list has ${listText()}.` : "");
      detail.hidden = list.hidden = shown.groups.length === 0;
      const most = d3.max(shown.groups, tokensOf) || 1;
      list.replaceChildren(
        ...shown.groups.map((group, place) => {
          const tokens = tokensOf(group);
          const bar = stackedBar([{ value: tokens, colour: groupColour(shown, group.group) }], most, { height: 8 });
          const size = `${format.counted(rowsOf(group), "row")} × ${format.counted(tokens, "token")}`;
          const name = element("b", {}, `group ${group.group}`);
          const mask = group.mask === "none" ? null : element("i", {}, "masked");
          const option = { id: `group-${place}`, role: "option", class: "group", onclick: () => choose(place) };
          return element("div", option, name, element("span", {}, size), mask, bar);
        }),
      );
      list.scrollTop = 0;
    }

    function itemsText() {
      const { counts, estimate } = shown;
      const text = `${format.counted(counts.items, "work item")} (${format.count(counts.partial_items)} partial)`;
      return estimate.items > counts.items ? `${text}, ${format.count(estimate.items)} over all heads` : text;
    }

    function listText() {
      const number = shown.groups.length;
      return number ? `the ${format.counted(number, "group")} with the most work` : "none of them: they are too large";
    }

    function choose(place) {
      chosen = place;
      [...list.children].forEach((option, index) => option.setAttribute("aria-selected", index === place));
      const option = list.children[place];
      if (!option) return;
      list.setAttribute("aria-activedescendant", option.id);
      keepInView(option);
      const group = shown.groups[place];
      title.textContent = `Group ${group.group}`;
      text.textContent = groupText(group);
      matrix(shown, group);
      tiles(shown, group);
    }

    // Scrolls the list alone: scrollIntoView would also move the page.
    function keepInView(option) {
      const top = option.offsetTop;
      if (top < list.scrollTop) list.scrollTop = top;
      const bottom = top + option.offsetHeight;
      if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
    }

    function groupText(group) {
      const rows = group.rows.slice(0, 6).map(([lo, hi]) => (hi - lo === 1 ? `${lo}` : `${lo} to ${hi - 1}`));
      const more = group.rows.length > 6 ? ` and ${format.counted(group.rows.length - 6, "more interval")}` : "";
      const nodes = new Set(group.segments.map((segment) => segment.node)).size;
      const seen = d3.sum(group.segments, ({ start, stop, seen: [lo, hi] }) => (stop - start) * (hi - lo));
      const hidden = format.percent(1 - seen / Math.max(rowsOf(group) * tokensOf(group), 1));
      const masks =
        group.mask === "none" ? "every row sees all of it" : `a mask (${group.mask}) hides ${hidden} of that from rows`;
      const one = rowsOf(group) === 1;
      return (
        `${one ? "Row" : "Rows"} ${rows.join(", ")}${more} ${one ? "reads" : "read"} ` +
        `${format.counted(tokensOf(group), "token")} ` +
        `of ${format.counted(nodes, "node")}; ${masks}. ${mergeText(group)}`
      );
    }

    function mergeText(group) {
      const { items } = shown;
      const partial = items.group.some((number, index) => number === group.group && items.partial[index] >= 0);
      if (!partial) return "Its results are final.";
      const shares = (other) =>
        other !== group && group.rows.some(([lo, hi]) => other.rows.some(([a, b]) => a < hi && lo < b));
      const others = shown.groups.filter(shares).map((other) => other.group);
      const more = others.length > 8 ? ` and ${format.count(others.length - 8)} more` : "";
      const named = others.length ? `, with those of groups ${others.slice(0, 8).join(", ")}${more}` : "";
      return `Its results are partial: ${shown.merged_by} merges them${named}.`.replace("items of", "the items of");
    }

    return draw;
  },
});

// What groups read more than once, as a list of the nodes that cost most; and what tiles read again.
function repeatedReads(strategy) {
  const { element, format, data } = page;
  const { marks, kv_token_bytes: size } = data.drawing;
  const extra = (index) => (strategy.reads.times[index] - 1) * marks.tokens[index] * size;
  const again = d3.range(marks.node.length).filter((index) => strategy.reads.times[index] > 1);
  const title = element("h3", {}, "Read more than once");
  const loads = strategy.estimate.kv_l2_bytes;
  const tiles = loads
    ? `Thread blocks load ${format.bytes(loads)} of KV beyond each token's first load, for other groups and other ` +
      "tiles of rows; L2 serves a part of it."
    : "Thread blocks load every token once.";
  if (!again.length) return [title, element("p", { class: "note" }, `Groups read no token twice. ${tiles}`)];
  again.sort((a, b) => extra(b) - extra(a));
  const top = again.slice(0, 6);
  const most = extra(top[0]);
  const total = d3.sum(again, extra);
  const lines = top.map((index) => {
    const name = marks.nodes[index] === 1 ? `node ${marks.node[index]}` : `${format.count(marks.nodes[index])} nodes`;
    const often = page.format.fixed(strategy.reads.times[index], 2);
    const read = `${name}, ${format.counted(marks.tokens[index], "token")}, ${often} times`;
    const bar = stackedBar([{ value: extra(index), colour: 5, hatched: true }], most);
    const amount = element("span", {}, `+${format.bytes(extra(index))}`);
    return element("li", {}, element("span", {}, read), element("div", { class: "measure" }, bar, amount));
  });
  const number = format.counted(again.length, "node");
  const are = again.length === 1 ? "is" : "are";
  const all = `${number} ${are} read more than once: ${format.bytes(total)} beyond one read each. ${tiles}`;
  return [title, element("ul", { class: "repeats" }, ...lines), element("p", { class: "note" }, all)];
}
