"use strict";

// Thread blocks of timelines: where they lie, which are neighbours, and what is told about them.

// The most blocks that an SM has beside each other, by launch.
function blockLanes({ blocks, launches }) {
  const lanes = new Array(launches.length).fill(1);
  blocks.launch.forEach((launch, index) => (lanes[launch] = Math.max(lanes[launch], blocks.slot[index] + 1)));
  return lanes;
}

// The box of a block in pixels; null outside of the scales x and y. Boxes have at least a pixel.
function blockBox({ timeline, y, lanes }, index, x) {
  const { launch, sm, start_us: start, end_us: end, slot } = timeline.blocks;
  const [t0, t1] = x.domain();
  const [s0, s1] = y.domain();
  if (end[index] < t0 || start[index] > t1 || sm[index] < s0 || sm[index] >= s1) return null;
  const lane = sm[index] + slot[index] / lanes[launch[index]];
  const [left, width] = pixels(x(start[index]), x(end[index]));
  const [top, height] = pixels(y(lane), y(lane + 1 / lanes[launch[index]]));
  return { left, top, width, height };
}

function blockName(blocks, index) {
  const more = blocks.items[index] > 1 ? ` and ${page.format.count(blocks.items[index] - 1)} more` : "";
  const number = page.format.count(blocks.first_item[index]);
  return `${blocks.group[index] < 0 ? "merged row" : "item"} ${number}${more}`;
}

// The [name, value] lines of a block's tip.
function blockLines(timeline, index) {
  const { format } = page;
  const { blocks } = timeline;
  const [start, end] = [blocks.start_us[index], blocks.end_us[index]];
  const lines = [
    ["timeline", timeline.name.toLowerCase()],
    ["launch", timeline.launches[blocks.launch[index]].name],
    ["SM", `${blocks.sm[index]}, slot ${blocks.slot[index]}`],
    ["time", `${(end - start).toFixed(2)} us: ${start.toFixed(2)} to ${end.toFixed(2)}`],
    ["rows", format.count(blocks.rows[index])],
  ];
  if (blocks.group[index] < 0) return lines;
  return [
    ...lines,
    ["group", format.count(blocks.group[index])],
    ["KV tokens", format.count(blocks.tokens[index])],
    ["KV", format.bytes(blocks.kv_bytes[index])],
  ];
}

// The block of an SM, or of the nearest one that has any, whose start is the nearest to a time.
function nearestBlock(blocks, sm, time) {
  const distance = (index) => 1e9 * Math.abs(blocks.sm[index] - sm) + Math.abs(blocks.start_us[index] - time);
  return d3.minIndex(blocks.sm, (_, index) => distance(index));
}

// The next block of the same SM, in the order of starts; undefined beyond the last one.
function blockAlong(blocks, index, step) {
  const own = d3.range(blocks.sm.length).filter((each) => blocks.sm[each] === blocks.sm[index]);
  const order = d3.sort(own, (a, b) => blocks.start_us[a] - blocks.start_us[b] || blocks.slot[a] - blocks.slot[b]);
  return order[order.indexOf(index) + step];
}

// The block at the same time on the next SM that has any; undefined beyond the last SM.
function blockAcross(blocks, index, step) {
  const used = d3.sort(new Set(blocks.sm));
  const sm = used[used.indexOf(blocks.sm[index]) + step];
  return sm === undefined ? undefined : nearestBlock(blocks, sm, blocks.start_us[index]);
}
