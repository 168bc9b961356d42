"use strict";

// The timeline of thread blocks on SMs: predicted above measured, on one scale of time.
page.panel({
  name: "timeline",
  title: "Timeline",
  lead:
    "When each thread block runs, and on which SM: time to the right, SMs downward. The hatched end is the tail, " +
    "from the first SM that is done to the end of all. Select a place to enlarge it. Arrow keys walk the blocks, " +
    "Enter enlarges, Escape goes back.",
  shows: (data) => (data.strategies || []).some((each) => each.timeline && each.timeline.predicted.launches.length),
  draw: (host) => {
    const { element } = page;
    const words = element("div", { class: "words" });
    const drawing = element("div");
    const tables = element("div");
    host.append(words, drawing, tables);
    const drawn = timelineDrawing(
      drawing,
      () => timelinesOf(page.strategy),
      (group) => groupColour(page.strategy, group),
    );
    let shown = null;
    return () => {
      if (shown !== page.strategy) {
        shown = page.strategy;
        words.replaceChildren(...timelinesOf(shown).map(timelineWords));
        tables.replaceChildren(...timelineTables(shown.timeline));
        drawn.reset();
      }
      drawn.draw();
    };
  },
});

// The timelines of a strategy that have blocks, with their names.
function timelinesOf(strategy) {
  if (!strategy.timeline) return [];
  const { predicted, measured } = strategy.timeline;
  const both = [
    { name: "Predicted", ...predicted },
    { name: "Measured", ...(measured || { launches: [] }) },
  ];
  return both.filter((each) => each.launches.length > 0);
}

function timelineWords(timeline) {
  const { format, element } = page;
  const parts = [
    `ends at ${format.time(timeline.total_us)}`,
    `tail ${format.time(timeline.tail_us)}`,
    `the busiest SM works ${timeline.imbalance.toFixed(2)} times the mean`,
  ];
  if (timeline.idle_sms) parts.push(`${timeline.idle_sms} of ${timeline.sms} SMs have no work`);
  if (timeline.plain_us) {
    const more = timeline.recorded_us / timeline.plain_us - 1;
    const usual = `the usual kernels take ${format.time(timeline.plain_us)}`;
    parts.push(`${usual}, those that record ${format.percent(more)} more`);
  }
  const blocks = timeline.blocks.launch.length;
  if (blocks < timeline.all_blocks) {
    parts.push(`${format.count(timeline.all_blocks)} blocks, drawn as ${format.count(blocks)}`);
  }
  return element("p", {}, element("strong", {}, `${timeline.name}: `), parts.join("; "));
}

// Tables of launches, and of classes of work with the model's error.
function timelineTables(timeline) {
  if (!timeline || !timeline.predicted.launches.length) return [];
  const { format } = page;
  const { predicted, measured, classes } = timeline;
  const span = (launch) => (launch ? `${launch.start_us.toFixed(1)} to ${launch.end_us.toFixed(1)} us` : "");
  const signed = (part) => (part === null ? "" : `${part < 0 ? "-" : "+"}${Math.abs(100 * part).toFixed(0)} %`);
  const columns = measured ? ["predicted", "measured"] : ["predicted"];
  const launches = predicted.launches.map((launch, index) => [
    launch.name,
    span(launch),
    ...(measured ? [span(measured.launches[index])] : []),
  ]);
  const kinds = classes.map((each) => [
    each.name,
    format.count(each.items),
    format.time(each.predicted_us),
    ...(measured ? [each.measured_us === null ? "" : format.time(each.measured_us), signed(each.error)] : []),
  ]);
  const told = ["class of work", "blocks", ...columns, ...(measured ? ["error of the model"] : [])];
  return [timelineTable("Launches", ["launch", ...columns], launches), timelineTable("A block's time", told, kinds)];
}

function timelineTable(caption, titles, rows) {
  const { element } = page;
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const body = rows.map(([name, ...cells]) =>
    element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((cell) => element("td", {}, cell))),
  );
  const table = element("table", { class: "weighed" }, element("thead", {}, head), element("tbody", {}, ...body));
  const scrolls = { class: "scroll", tabindex: 0, role: "region", "aria-label": caption };
  return element("div", {}, element("h3", {}, caption), element("div", scrolls, table));
}
