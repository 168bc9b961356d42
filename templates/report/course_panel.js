"use strict";

// The course of a decoding: charts over its steps with a slider, the figures of the chosen step, and its tree.
page.panel({
  name: "course",
  title: "Course",
  lead: "What each step reads, shares and takes. Move the slider, or point at a chart, to see the figures of a step.",
  shows: (data) => Boolean(data.course && data.course.steps.length),
  draw: (host) => {
    const { element, format } = page;
    const { course } = page.data;
    const { steps, charts, drawings, facts } = course;
    let chosen = Math.floor(steps.length / 2);
    const told = element("output", { for: "course-step", class: "where" });
    const slider = element("input", {
      type: "range",
      id: "course-step",
      min: 0,
      max: steps.length - 1,
      step: 1,
      value: chosen,
      oninput: (event) => choose(Number(event.target.value)),
    });
    const names = charts[0].lines.map((line) => line.name);
    const words = element("p", { class: "facts-of-step" });
    const grid = element("div", { class: "charts" });
    const scrolls = { class: "scroll", tabindex: 0, role: "region", "aria-label": "Figures of the step" };
    const figures = element("div", scrolls);
    const tree = element("div");
    host.append(
      element("p", { class: "note" }, course.words),
      element("label", { class: "controls", for: "course-step" }, "Step ", slider, told),
      words,
      courseLegend(names),
      grid,
      element("h3", {}, "Figures of the step"),
      figures,
      ...(drawings ? [element("h3", {}, "Tree at the step"), tree] : []),
    );
    const drawn = [...charts, ...facts.map(courseFact)].map((chart) => courseChart(grid, chart, steps, names, choose));

    function choose(index) {
      chosen = index;
      slider.value = index;
      update();
    }

    function update() {
      const text = `${format.count(steps[chosen])} of ${format.count(steps[steps.length - 1])}`;
      told.textContent = text;
      slider.setAttribute("aria-valuetext", `step ${text}`);
      for (const each of drawn) each.point(chosen);
      words.textContent = facts.map((each) => `${each.name}: ${courseText(each.values[chosen], each.unit)}`).join("; ");
      figures.replaceChildren(courseTable(charts, names, chosen));
      if (!drawings) return;
      tree.replaceChildren();
      const label = `The tree at step ${steps[chosen]}: nodes as boxes of tokens and rows`;
      icicle(tree, drawings[chosen], { label, height: 220, layer: () => null })();
    }

    return () => {
      for (const each of drawn) each.draw();
      update();
    };
  },
});

// A fact as a chart of one line.
const courseFact = ({ name, unit, values }) => ({ title: name, unit, lines: [{ name: "", values }] });

// The classes of a name's line: a colour, and dashes that neighbours do not have.
const courseLine = (index) => `course-line line${index % 8} dash${index % 3}`;

function courseLegend(names) {
  const items = names.map((name, index) => {
    const svg = shapes.svg(26, 10, name);
    d3.select(svg).append("line").attr("class", courseLine(index)).attr("x2", 26).attr("y1", 5).attr("y2", 5);
    return page.element("li", {}, svg, ` ${name}`);
  });
  return page.element("ul", { class: "swatches" }, ...items);
}

// A tick of an axis.
function courseTick(value, unit) {
  if (unit === "bytes") return page.format.bytes(value).replace(".0 ", " ");
  return `${d3.format(",~g")(value)}${{ us: " us", ms: " ms", ratio: "x" }[unit] || ""}`;
}

// The ticks of a scale of values, which is logarithmic if wide. Bytes have round numbers of their binary unit.
function courseTicks(scale, [least, most], unit, wide) {
  if (unit === "bytes" && wide) {
    const step = Math.max(1, Math.ceil(Math.log2(most / least) / 5));
    const first = Math.ceil(Math.log2(least));
    return d3.range(first, Math.log2(most), step).map((power) => 2 ** power);
  }
  if (unit === "bytes") {
    const binary = 1024 ** Math.floor(Math.log2(Math.max(most, 1)) / 10);
    return d3.ticks(0, most / binary, 4).map((number) => number * binary);
  }
  if (!wide) return scale.ticks(4);
  const powers = scale.ticks().filter((value) => Number.isInteger(Math.round(1e6 * Math.log10(value)) / 1e6));
  return powers.length > 1 ? powers : scale.ticks(4);
}

function courseText(value, unit) {
  const { format } = page;
  if (value === null || value === undefined) return "-";
  const texts = { bytes: format.bytes, us: format.time, ratio: format.ratio, count: format.count };
  return unit === "ms" ? `${value.toFixed(2)} ms` : texts[unit](value);
}

// The figures of a step: a line for each name, a column for each chart that has it.
function courseTable(charts, names, index) {
  const { element } = page;
  const titles = ["", ...charts.map((chart) => chart.title)];
  const rows = names.map((name) => {
    const cells = charts.map((chart) => {
      const line = chart.lines.find((each) => each.name === name);
      return element("td", {}, line ? courseText(line.values[index], chart.unit) : "");
    });
    return element("tr", {}, element("th", { scope: "row" }, name), ...cells);
  });
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  return element("table", { class: "weighed course" }, element("thead", {}, head), element("tbody", {}, ...rows));
}

// A chart {title, unit, lines} over steps. choose(index) is called for the step under the pointer.
// Returns {draw, point}: point marks a step.
function courseChart(host, { title, unit, lines }, steps, names, choose) {
  const HEIGHT = 180;
  const MARGIN = { left: 64, right: 10, top: 8, bottom: 22 };
  const svg = d3.select(shapes.svg(0, HEIGHT, `${title}, by step`));
  const caption = page.element("figcaption", {}, title);
  const figure = page.element("figure", { class: "curve" }, caption, svg.node());
  host.append(figure);
  const values = lines.flatMap((line) => line.values).filter((value) => value > 0);
  const [least, most] = [d3.min(values) || 0, d3.max(values) || 1];
  const wide = most / least > 30;
  if (wide) caption.append(page.element("span", { class: "scale" }, ", logarithmic"));
  let x = d3.scaleLinear();
  const y = wide
    ? d3.scaleLog([least, most], [HEIGHT - MARGIN.bottom, MARGIN.top])
    : d3.scaleLinear([0, most], [HEIGHT - MARGIN.bottom, MARGIN.top]);
  const visible = (value) => value !== null && (!wide || value > 0);

  function draw() {
    const width = Math.max(figure.clientWidth, 200);
    const last = Math.max(steps[steps.length - 1], steps[0] + 1);
    x = d3.scaleLinear([steps[0], last], [MARGIN.left, width - MARGIN.right]);
    svg.attr("width", width).selectAll("*").remove();
    for (const tick of courseTicks(y, [least, most], unit, wide)) {
      svg.append("line").attr("class", "rule").attr("x1", MARGIN.left).attr("x2", width - MARGIN.right)
        .attr("y1", y(tick)).attr("y2", y(tick));
      svg.append("text").attr("class", "tick").attr("x", MARGIN.left - 6).attr("y", y(tick) + 4)
        .attr("text-anchor", "end").text(courseTick(tick, unit));
    }
    for (const tick of x.ticks(5).filter(Number.isInteger)) {
      svg.append("text").attr("class", "tick").attr("x", x(tick)).attr("y", HEIGHT - 6)
        .attr("text-anchor", "middle").text(page.format.count(tick));
    }
    const path = d3.line((_, index) => x(steps[index]), (value) => y(value)).defined(visible);
    for (const { name, values: own } of lines) {
      const index = names.indexOf(name);
      svg.append("path").attr("class", courseLine(Math.max(index, 0))).attr("d", path(own));
    }
    svg.append("line").attr("class", "cursor").attr("y1", MARGIN.top).attr("y2", HEIGHT - MARGIN.bottom);
    svg.append("g").attr("class", "points");
  }

  function point(index) {
    svg.select(".cursor").attr("x1", x(steps[index])).attr("x2", x(steps[index]));
    const shown = lines.filter((line) => visible(line.values[index]));
    svg.select(".points").selectAll("circle").data(shown).join("circle").attr("r", 4)
      .attr("class", (line) => `provider provider${Math.max(names.indexOf(line.name), 0) % 8}`)
      .attr("cx", x(steps[index])).attr("cy", (line) => y(line.values[index]));
  }

  // Chooses the step under the pointer, and names the line that is the nearest to it.
  svg.node().addEventListener("pointermove", (event) => {
    const bounds = svg.node().getBoundingClientRect();
    const step = x.invert(event.clientX - bounds.left);
    const index = d3.minIndex(steps, (each) => Math.abs(each - step));
    choose(index);
    const shown = lines.filter((line) => visible(line.values[index]));
    const near = d3.least(shown, (line) => Math.abs(y(line.values[index]) - (event.clientY - bounds.top)));
    svg.selectAll(".course-line").classed("near", (_, place) => names.length > 1 && lines[place] === near);
    if (!near) return page.hideTip();
    const told = [[title, courseText(near.values[index], unit)], ["step", page.format.count(steps[index])]];
    return page.showTip(near.name || title, told, event.clientX, event.clientY);
  });
  svg.node().addEventListener("pointerleave", () => {
    svg.selectAll(".course-line").classed("near", false);
    page.hideTip();
  });
  return { draw, point };
}
