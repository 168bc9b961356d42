"use strict";

// Results of benchmarks: a table of cases by providers, which is sorted by a click on a title, with times over floors
// as marks on one scale.
page.panel({
  name: "results",
  title: "Results",
  lead:
    "Each line is a case. Its marks are the providers' times as multiples of the floor: the time to move unique KV, " +
    "queries and results once at the copy rate of the device, or the time for the arithmetic, whichever is longer. " +
    "Further left is better. Reading is a little faster than copying, so a time may be below 1. Select a title to " +
    "sort.",
  shows: (data) => Boolean(data.results),
  draw: (host) => {
    const { element } = page;
    const { results } = page.data;
    const state = { figure: 0, heads: "", sort: 0, down: false };
    const controls = element("div", { class: "controls" });
    const legend = element("div");
    const table = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Results by case" });
    host.append(controls, legend, table, ...summaryOf(results), ...problemsOf(results));
    const heads = [...new Set(results.cases.map((each) => each.heads))];
    const choice = (label, id, options, set) => {
      const list = options.map((text, index) => element("option", { value: index }, text));
      const node = element("select", { id, onchange: (event) => (set(Number(event.target.value)), draw()) }, ...list);
      return element("label", { class: "choice" }, `${label} `, node);
    };
    if (results.figures.length > 1) {
      const names = results.figures.map((each) => `${each.name}, ${each.unit}`);
      controls.append(choice("Figure", "results-figure", names, (index) => (state.figure = index)));
    }
    if (heads.length > 1) {
      const names = ["all", ...heads];
      controls.append(choice("Heads", "results-heads", names, (index) => (state.heads = index ? names[index] : "")));
    }

    function draw() {
      legend.replaceChildren(resultMarks(results.providers));
      table.replaceChildren(resultTable(results, state, (column) => {
        state.down = state.sort === column && !state.down;
        state.sort = column;
        draw();
        table.querySelectorAll("button")[column].focus();
      }));
    }
    return draw;
  },
});

const resultSymbols = [
  d3.symbolCircle, d3.symbolSquare, d3.symbolTriangle, d3.symbolDiamond, d3.symbolCross, d3.symbolStar, d3.symbolWye,
];

// A provider's mark: a shape and a colour of its own.
function resultMark(index, size = 60) {
  const mark = document.createElementNS("http://www.w3.org/2000/svg", "path");
  mark.setAttribute("d", d3.symbol(resultSymbols[index % resultSymbols.length], size)());
  mark.setAttribute("class", `provider provider${index % 8}`);
  return mark;
}

function resultMarks(providers) {
  const items = providers.map((name, index) => {
    const svg = shapes.svg(16, 16, name);
    const mark = resultMark(index);
    mark.setAttribute("transform", "translate(8 8)");
    svg.append(mark);
    return page.element("li", {}, svg, ` ${name}`);
  });
  return page.element("ul", { class: "swatches" }, ...items);
}

// The table for a state {figure, heads, sort, down}. sorted(column) is called by the titles.
function resultTable({ cases, figures, providers }, state, sorted) {
  const { element } = page;
  const figure = figures[state.figure];
  const valueOf = (each, provider) => {
    const outcome = each.outcomes[provider];
    return outcome ? outcome.values[state.figure] : null;
  };
  const shown = cases.filter((each) => !state.heads || each.heads === state.heads);
  const titles = ["case", "heads", ...(figure.over_floor ? ["floor us"] : []), ...providers];
  const columns = [
    (each) => each.name,
    (each) => each.heads,
    ...(figure.over_floor ? [(each) => each.floor_us] : []),
    ...providers.map((provider) => (each) => over(each, provider)),
  ];
  function over(each, provider) {
    const value = valueOf(each, provider);
    return value !== null && figure.over_floor ? value / each.floor_us : value;
  }
  const sort = Math.min(state.sort, columns.length - 1);
  const compare = state.down ? d3.descending : d3.ascending;
  const given = state.sort === 0 && !state.down;
  const order = given ? shown : d3.sort(shown, (a, b) => compare(columns[sort](a), columns[sort](b)));
  const all = shown.flatMap((each) => providers.map((provider) => over(each, provider)));
  const values = all.filter((value) => value > 0);
  const range = [Math.min(figure.over_floor ? 1 : Infinity, d3.min(values) || 1), Math.max(d3.max(values) || 1, 1.01)];
  const x = d3.scaleLog(range, [8, 212]);
  const header = titles.map((title, column) => {
    const arrow = sort === column && (state.sort || state.down) ? (state.down ? " ▾" : " ▴") : "";
    const told = arrow ? (state.down ? "descending" : "ascending") : null;
    const button = element("button", { type: "button", class: "sorts", onclick: () => sorted(column) }, title, arrow);
    return element("th", { scope: "col", "aria-sort": told }, button);
  });
  const scale = figure.over_floor ? "time / floor" : `${figure.name}, ${figure.unit}`;
  const own = titles.length - providers.length; // columns before those of providers
  header.splice(own, 0, element("th", { scope: "col" }, scale, resultScale(x)));
  const rows = order.map((each) => {
    const least = d3.min(providers, (provider) => valueOf(each, provider));
    const cells = providers.map((provider) => resultCell(each, provider, valueOf(each, provider), figure, least));
    const strip = resultStrip(providers, (provider) => over(each, provider), x, each.name);
    tipOver(strip, each.name, () => [
      ["heads", each.heads],
      ["case", each.facts],
      ...providers.map((name) => [name, resultText(valueOf(each, name), figure.unit, over(each, name))]),
    ]);
    const floor = figure.over_floor ? [element("td", {}, each.floor_us.toFixed(1))] : [];
    const name = element("th", { scope: "row", title: each.facts }, ...breakable(each.name));
    return element("tr", {}, name, element("td", {}, each.heads), ...floor, element("td", {}, strip), ...cells);
  });
  return element("table", { class: "weighed results" },
    element("thead", {}, element("tr", {}, ...header)), element("tbody", {}, ...rows));
}

// A name that may break after commas and slashes.
const breakable = (name) => name.split(/(?<=[,/])/).flatMap((part) => [part, page.element("wbr")]);

function resultText(value, unit, over) {
  if (value === null) return "-";
  const text = `${value.toFixed(unit === "ms" ? 2 : 1)} ${unit}`;
  return over === value ? text : `${text}, ${page.format.ratio(over)} the floor`;
}

// A time, or the status of an outcome without one.
function resultCell(each, provider, value, figure, least) {
  const outcome = each.outcomes[provider];
  if (value === null) {
    const status = outcome && outcome.status !== "unavailable" && outcome.status !== "right" ? outcome.status : "-";
    return page.element("td", { class: "same", title: outcome ? outcome.detail : "not run" }, status);
  }
  return page.element("td", { class: value === least ? "least" : "" }, value.toFixed(figure.unit === "ms" ? 2 : 1));
}

// The providers' marks of a case on the scale x, with the first provider's mark on top.
function resultStrip(providers, valueOf, x, name) {
  const svg = shapes.svg(220, 22, `times of ${name}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const places = { x1: 8, x2: 212, y1: 11, y2: 11, class: "rule" };
  for (const [key, value] of Object.entries(places)) line.setAttribute(key, value);
  svg.append(line);
  for (const index of d3.range(providers.length).reverse()) {
    const value = valueOf(providers[index]);
    if (!(value > 0)) continue;
    const mark = resultMark(index);
    mark.setAttribute("transform", `translate(${x(value).toFixed(1)} 11)`);
    svg.append(mark);
  }
  return svg;
}

function resultScale(x) {
  const svg = shapes.svg(220, 16, "scale");
  for (const tick of x.ticks(4).filter((value) => [1, 2, 5].includes(Number(String(value).replace(/[0.]/g, ""))))) {
    const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
    for (const [key, value] of Object.entries({ x: x(tick), y: 12, class: "tick", "text-anchor": "middle" }))
      text.setAttribute(key, value);
    text.textContent = d3.format("~g")(tick);
    svg.append(text);
  }
  return page.element("div", {}, svg);
}

function summaryOf({ summary }) {
  const { element } = page;
  if (summary.length < 2) return [];
  const [titles, ...rows] = summary;
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const body = rows.map(([name, ...cells]) =>
    element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((cell) => element("td", {}, cell))));
  const table = element("table", { class: "weighed" }, element("thead", {}, head), element("tbody", {}, ...body));
  return [element("h3", {}, "Summary"), element("div", { class: "scroll" }, table)];
}

function problemsOf({ problems }) {
  if (!problems.length) return [];
  const lines = problems.map((line) => page.element("li", {}, line));
  return [page.element("h3", {}, "Without a time"), page.element("ul", { class: "note" }, ...lines)];
}
