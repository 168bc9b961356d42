"use strict";

// The bytes of whole decodings, a line for each strategy.
page.panel({
  name: "totals",
  title: "All steps",
  lead: "Bytes that each strategy moves over all steps, decodings and layers, and how much less KV than query reads.",
  shows: (data) => Boolean(data.totals),
  draw: (host) => {
    const { data, element, format } = page;
    const columns = [
      ["KV", "kv_hbm_bytes"],
      ["scores", "score_bytes"],
      ["masks", "mask_bytes"],
      ["partials", "partial_bytes"],
    ];
    const titles = ["strategy", ...columns.map(([title]) => title), "less KV than query"];
    const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
    const rows = data.totals.strategies.map((each) => {
      const cells = [...columns.map(([, field]) => format.bytes(each[field])), format.percent(each.kv_reduction)];
      return element(
        "tr",
        {},
        element("th", { scope: "row" }, each.name),
        ...cells.map((cell) => element("td", {}, cell)),
      );
    });
    const table = element("table", { class: "weighed" }, element("thead", {}, head), element("tbody", {}, ...rows));
    const scrolls = { class: "scroll", tabindex: 0, role: "region", "aria-label": "Bytes by strategy" };
    host.append(element("p", { class: "note" }, data.totals.words), element("div", scrolls, table));
    return () => {};
  },
});
