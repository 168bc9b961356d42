"use strict";

// Strategies side by side, in order of estimated time. Selecting one draws the other panels again.
page.panel({
  name: "strategies",
  title: "Strategies",
  lead: "Every strategy's plan for this tree, the fastest first. Select one to see its plan in the other panels.",
  shows: (data) => (data.strategies || []).length > 0,
  draw: (host) => {
    const { data, element, format } = page;
    const TIMES = [
      { key: "launching", name: "launching", colour: 7, hatched: true },
      { key: "items", name: "work items", colour: 0 },
      { key: "merges", name: "merges", colour: 1, hatched: true },
      { key: "unfused", name: "unfused traffic", colour: 5 },
    ];
    const BYTES = [
      { key: "kv_unique_bytes", name: "KV, each token once", colour: 0 },
      { key: "kv_l2_bytes", name: "KV read again by tiles and groups", colour: 5, hatched: true },
      { key: "q_bytes", name: "queries", colour: 2 },
      { key: "out_bytes", name: "out and lse", colour: 6 },
      { key: "partial_bytes", name: "partials, written and read", colour: 1, hatched: true },
      { key: "score_bytes", name: "scores, written and read", colour: 3 },
      { key: "mask_bytes", name: "masks", colour: 4 },
    ];
    const order = d3.sort(d3.range(data.strategies.length), (index) => data.strategies[index].rank);
    const partsOf = (kinds, amounts) => kinds.map((kind) => ({ ...kind, value: amounts[kind.key] }));
    const totalOf = (kinds, amounts) => d3.sum(kinds, (kind) => amounts[kind.key]);
    const mostTime = sharedWidth(data.strategies.map((each) => totalOf(TIMES, each.times)));
    const mostBytes = sharedWidth(data.strategies.map((each) => totalOf(BYTES, each.estimate)));
    const list = element("div", { class: "strategies", role: "radiogroup", "aria-label": "Strategy shown" });
    host.append(list);
    const radios = [];
    for (const index of order) list.append(entry(index));
    const used = (kinds, field) => kinds.filter((kind) => data.strategies.some((each) => each[field][kind.key] > 0));
    host.append(
      element("p", { class: "legend" }, "Time"),
      swatches(used(TIMES, "times")),
      element("p", { class: "legend" }, "Bytes"),
      swatches(used(BYTES, "estimate")),
    );
    return () => {
      for (const radio of radios) {
        radio.checked = Number(radio.value) === page.selected;
        radio.closest(".strategy").classList.toggle("chosen", radio.checked);
      }
    };

    function entry(index) {
      const each = data.strategies[index];
      const { estimate } = each;
      const radio = element("input", {
        type: "radio",
        name: "shown",
        value: index,
        onchange: () => page.select(index),
      });
      radios.push(radio);
      const bytes = totalOf(BYTES, estimate);
      const time = element(
        "div",
        { class: "measure" },
        stackedBar(partsOf(TIMES, each.times), mostTime, { label: `estimated time ${format.time(estimate.time_us)}` }),
        element("span", {}, format.time(estimate.time_us)),
      );
      const moved = element(
        "div",
        { class: "measure" },
        stackedBar(partsOf(BYTES, estimate), mostBytes, { label: `bytes ${format.bytes(bytes)}` }),
        element("span", {}, format.bytes(bytes)),
      );
      tipOver(time, each.summary, () => partLines(TIMES, each.times, format.time));
      tipOver(moved, each.summary, () => [
        ...partLines(BYTES, estimate, format.bytes),
        ["KV read by groups", format.bytes(estimate.kv_hbm_bytes)],
      ]);
      const facts = [
        format.counted(each.counts.groups, "group"),
        format.counted(estimate.items, "piece"),
        format.counted(estimate.launches, "launch").replace(/launchs$/, "launches"),
        `${format.percent(estimate.padding_waste)} padding or masked`,
      ];
      const best = index === data.best_strategy ? element("span", { class: "badge" }, "auto's choice") : null;
      return element(
        "label",
        { class: "strategy" },
        element("span", { class: "name" }, radio, element("b", {}, each.summary), best),
        time,
        moved,
        element("span", { class: "facts" }, facts.join(", ")),
        element("span", { class: "why" }, `${each.rank}. ${each.rank_reason}`),
      );
    }

    function partLines(kinds, amounts, write) {
      return kinds.filter((kind) => amounts[kind.key] > 0).map((kind) => [kind.name, write(amounts[kind.key])]);
    }
  },
});
