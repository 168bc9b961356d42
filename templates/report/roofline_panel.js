"use strict";

// The floor of the case, the estimate, and what holds the strategy back; the roofline with all strategies on it.
page.panel({
  name: "roofline",
  title: "Roofline",
  lead:
    "The floor is the least time for this case: every byte of KV, queries and results once, or every operation once, " +
    "at the full rates of the device. The chart shows how much work each strategy does for a byte that it moves.",
  shows: (data) => Boolean(data.floor && data.floor.flops > 0),
  draw: (host) => {
    const { data, element, format } = page;
    const { floor, device } = data;
    const times = element("div", { class: "floors" });
    const words = element("p", { class: "words" });
    const chart = element("div", { class: "chart" });
    const note = element(
      "p",
      { class: "note" },
      "A strategy reaches the slope where memory sets its time, and passes it where L2 serves KV that it reads again.",
    );
    host.append(times, words, chart, note);
    const peak = device.tensor_tflops * 1e6; // operations in a microsecond
    const rate = device.memory_gbps * 1e3; // bytes in a microsecond
    const rates = `${format.count(device.tensor_tflops)} TFLOP/s, ${format.count(device.memory_gbps)} GB/s`;
    const moved = ({ estimate: e }) =>
      e.kv_hbm_bytes + e.q_bytes + e.out_bytes + e.partial_bytes + e.score_bytes + e.mask_bytes;

    function draw() {
      const shown = page.strategy;
      const measured = shown.timeline && shown.timeline.measured ? shown.timeline.measured.plain_us : null;
      const rows = [
        { name: "floor by memory", us: floor.memory_us, colour: 2 },
        { name: "floor by arithmetic", us: floor.arithmetic_us, colour: 4 },
        { name: "estimate", us: shown.estimate.time_us, colour: 0 },
      ];
      if (measured !== null) rows.push({ name: "measured", us: measured, colour: 5, hatched: true });
      const most = d3.max(rows, (row) => row.us);
      times.replaceChildren(...rows.map((row) => timeElement(row, most)));
      words.textContent = heldBack(shown, measured);
      chart.replaceChildren(roofs(shown));
    }

    function timeElement(row, most) {
      const bar = stackedBar([{ value: row.us, colour: row.colour, hatched: row.hatched }], most);
      const measure = element("div", { class: "measure" }, bar, element("span", {}, format.time(row.us)));
      return element("div", { class: "floor" }, element("span", {}, row.name), measure);
    }

    function heldBack(shown, measured) {
      const us = shown.estimate.time_us;
      const { launching, merges } = shown.times;
      const parts = [
        `The floor is ${format.time(floor.time_us)}, set by ${floor.bound}: ${format.bytes(floor.bytes)} and ` +
          `${format.flops(floor.flops)}.`,
        `${shown.summary} is estimated at ${format.time(us)}, ${format.ratio(us / floor.time_us)} the floor. ` +
          `What holds it back: it is ${shown.bound}.`,
        `Starting launches takes ${format.percent(launching / us)} of it, merges ${format.percent(merges / us)}.`,
      ];
      if (measured !== null) parts.push(`Measured: ${format.time(measured)}.`);
      return parts.join(" ");
    }

    function roofs(shown) {
      const width = chart.clientWidth || 600;
      const height = Math.min(380, Math.max(250, width * 0.45));
      const margin = { left: 62, right: 16, top: 14, bottom: 42 };
      const points = data.strategies.map((each, index) => ({
        each,
        index,
        x: floor.flops / Math.max(moved(each), 1),
        y: floor.flops / Math.max(each.estimate.time_us, 1e-9) / 1e6,
      }));
      const best = { x: floor.flops / Math.max(floor.bytes, 1), y: floor.flops / floor.time_us / 1e6 };
      const all = [...points, best];
      const ridge = peak / rate;
      const x = d3.scaleLog(
        [Math.min(d3.min(all, (p) => p.x) / 2, ridge / 4), Math.max(d3.max(all, (p) => p.x) * 2, ridge * 4)],
        [margin.left, width - margin.right],
      );
      const y = d3.scaleLog(
        [d3.min(all, (p) => p.y) / 2, Math.max(peak / 1e6, best.y) * 1.7],
        [height - margin.bottom, margin.top],
      );
      const svg = d3
        .create("svg")
        .attr("viewBox", `0 0 ${width} ${height}`)
        .attr("role", "group")
        .attr("aria-label", "Roofline: operations per byte and TFLOP/s of each strategy");
      axes(svg, x, y, { width, height, margin });
      const [low, high] = x.domain();
      const start = Math.max(low, (y.domain()[0] * 1e6) / rate);
      const roof = [start, ridge, high].map((at) => [x(at), y(Math.min(at * rate, peak) / 1e6)]);
      svg.append("path").attr("class", "roof").attr("d", d3.line()(roof));
      svg
        .append("text")
        .attr("class", "faint")
        .attr("text-anchor", "end")
        .attr("x", width - margin.right)
        .attr("y", y(peak / 1e6) - 10)
        .text(width < 480 ? device.name : `${device.name}: ${rates}`);
      diamond(svg, x(best.x), y(best.y));
      const sorted = [...points].sort((a, b) => (a.index === page.selected) - (b.index === page.selected));
      for (const point of sorted) dot(svg, point, x, y, { shown, width });
      return svg.node();
    }

    function axes(svg, x, y, { width, height, margin }) {
      const few = (scale) => scale.ticks().filter((tick) => Number.isInteger(Math.round(1e6 * Math.log10(tick)) / 1e6));
      const text = (tick) => (tick < 1 ? String(tick) : format.count(tick));
      const bottom = d3.axisBottom(x).tickValues(few(x)).tickFormat(text).tickSizeOuter(0);
      const left = d3.axisLeft(y).tickValues(few(y)).tickFormat(text).tickSizeOuter(0);
      svg
        .append("g")
        .attr("class", "axis")
        .attr("transform", `translate(0,${height - margin.bottom})`)
        .call(bottom);
      svg.append("g").attr("class", "axis").attr("transform", `translate(${margin.left},0)`).call(left);
      const name = (place, anchor) =>
        svg.append("text").attr("class", "faint").attr("text-anchor", anchor).attr("transform", place);
      name(`translate(${width - margin.right},${height - 6})`, "end").text("operations per byte moved");
      name(`translate(14,${margin.top}) rotate(-90)`, "end").text("TFLOP/s");
    }

    function diamond(svg, x, y) {
      const mark = svg.append("path").attr("class", "floor-mark").attr("transform", `translate(${x},${y})`);
      mark.attr("d", d3.symbol(d3.symbolDiamond, 130)());
      svg
        .append("text")
        .attr("class", "strong")
        .attr("text-anchor", "end")
        .attr("x", x - 12)
        .attr("y", y + 4)
        .text("floor");
    }

    function dot(svg, point, x, y, { width }) {
      const chosen = point.index === page.selected;
      const node = svg
        .append("circle")
        .attr("class", chosen ? "dot chosen" : "dot")
        .attr("cx", x(point.x))
        .attr("cy", y(point.y))
        .attr("r", chosen ? 8 : 5.5)
        .attr("tabindex", 0)
        .attr("role", "button")
        .attr("aria-label", point.each.summary)
        .on("click", () => page.select(point.index))
        .on("keydown", (event) => event.key === "Enter" && page.select(point.index));
      tipOver(node.node(), point.each.summary, () => [
        ["estimated time", format.time(point.each.estimate.time_us)],
        ["operations per byte", page.format.fixed(point.x, 1)],
        ["rate", `${page.format.fixed(point.y, 1)} TFLOP/s`],
        ["over the floor", format.ratio(point.each.estimate.time_us / floor.time_us)],
      ]);
      if (!chosen) return;
      const right = x(point.x) < width - 180;
      svg
        .append("text")
        .attr("class", "strong")
        .attr("text-anchor", right ? "start" : "end")
        .attr("x", x(point.x) + (right ? 13 : -13))
        .attr("y", y(point.y) + 5)
        .text(point.each.name);
    }

    return draw;
  },
});
