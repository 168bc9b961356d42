"use strict";

// The outcomes of a run's providers, as the command prints them.
page.panel({
  name: "outcomes",
  title: "Whole runs",
  shows: (data) => (data.outcomes || []).length > 1,
  draw: (host) => {
    const { element, data } = page;
    const [titles, ...rows] = data.outcomes;
    const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
    const body = rows.map(([name, ...cells]) =>
      element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((cell) => element("td", {}, cell))),
    );
    const table = element("table", { class: "weighed" }, element("thead", {}, head), element("tbody", {}, ...body));
    const scrolls = { class: "scroll", tabindex: 0, role: "region", "aria-label": "Outcomes by provider" };
    host.append(element("div", scrolls, table));
    return () => {};
  },
});
