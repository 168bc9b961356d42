"use strict";

// The policies that auto weighs: estimated times of all of them, and measured times where tuning has some.
page.panel({
  name: "search",
  title: "Search",
  lead:
    "auto weighs a fixed list of policies by their estimated times: ways to divide rows into cohorts, " +
    "each with work items of several sizes, one for a number of thread blocks per SM. Lower is better; = means " +
    "that there are enough items without a split. These estimates are made without a plan; the other panels count " +
    "finished plans, whose times differ a little.",
  shows: (data) => Boolean(data.search),
  draw: (host) => {
    const { data, element, format } = page;
    const { search } = data;
    const grid = element("div", {
      class: "scroll",
      tabindex: 0,
      role: "region",
      "aria-label": "Policies that were weighed",
    });
    const list = element("div", {});
    host.append(
      grid,
      element("h3", {}, "Estimates and measurements"),
      element("p", { class: "note" }, sourceText()),
      list,
    );

    function draw() {
      grid.replaceChildren(weighedTable());
      list.replaceChildren(candidateList());
    }

    function sourceText() {
      if (search.measured) {
        const { measured_us: us, source } = search.measured;
        return `Measured for trees of its bucket (${search.bucket}): ${source}; the fastest took ${format.time(us)}.`;
      }
      return (
        `No policy was measured for trees of its bucket (${search.bucket}) on ${data.target}, ` +
        "so the estimate decides. treegen tune measures."
      );
    }

    // A row for each walk, a column for each number of thread blocks per SM; darker cells are slower.
    function weighedTable() {
      const least = d3.min(search.time_us.flat());
      const shade = d3.scaleLog([least, least * 4], [0, 55]).clamp(true);
      const named = new Map([[null, "no split"], ["even", "even shares"]]);
      const titles = search.blocks_per_sm.map((blocks) => named.get(blocks) ?? `${blocks} per SM`);
      const head = element(
        "tr",
        {},
        element("th", {}, "estimated us"),
        ...titles.map((title) => element("th", { scope: "col" }, title)),
      );
      const rows = search.walks.map((walk, column) => {
        const cells = search.time_us.map((row, line) =>
          cell(row[column], search.split[line][column], line, column, shade),
        );
        return element("tr", {}, element("th", { scope: "row" }, walk), ...cells);
      });
      return element("table", { class: "weighed" }, element("thead", {}, head), element("tbody", {}, ...rows));
    }

    function cell(us, split, line, column, shade) {
      const none = split === null && line > 0; // the same as without a split: there are enough items
      const best = search.best[0] === line && search.best[1] === column;
      const node = element("td", { class: best ? "best" : none ? "same" : "" }, none ? "=" : page.format.fixed(us, 1));
      if (!none)
        node.style.backgroundColor = `color-mix(in srgb, var(--fill5) ${Math.round(shade(us))}%, var(--panel))`;
      tipOver(node, search.walks[column], () => [
        ["estimated time", format.time(us)],
        ["tokens per item", split === null ? "not split" : format.count(split)],
      ]);
      return node;
    }

    function candidateList() {
      const MOST = 12;
      const known = search.candidates.filter((each) => each.measured_us !== null && each.measured_us !== undefined);
      const rows = known.length ? d3.sort(known, (each) => each.measured_us) : search.candidates;
      const times = rows.slice(0, MOST).flatMap((each) => [each.estimated_us || 0, each.measured_us || 0]);
      const most = d3.max(times) || 1;
      const lines = rows.slice(0, MOST).map((each) => candidate(each, most));
      const left = rows.length - lines.length;
      const more =
        left > 0
          ? element("p", { class: "note" }, `${format.counted(left, "more policy").replace(/policys$/, "policies")}.`)
          : null;
      const legend = swatches([
        { name: "estimated", colour: 0 },
        ...(known.length ? [{ name: "measured", colour: 5, hatched: true }] : []),
      ]);
      return element("div", {}, ...lines, more, legend);
    }

    function candidate(each, most) {
      const bars = [];
      const add = (us, colour, hatched, what) => {
        if (us === null || us === undefined) return;
        const bar = stackedBar([{ value: us, colour, hatched }], most, {
          height: 11,
          label: `${what} ${format.time(us)}`,
        });
        bars.push(element("div", { class: "measure" }, bar, element("span", {}, format.time(us))));
      };
      add(each.estimated_us, 0, false, "estimated");
      add(each.measured_us, 5, true, "measured");
      return element("div", { class: "floor" }, element("span", {}, each.policy), element("div", {}, ...bars));
    }

    return draw;
  },
});
