"use strict";

// Groups of a strategy: their colours and sizes, and the layer that shows them on an icicle.

// The groups of a strategy as the layer of an icicle; null without a strategy.
function groupLayer(strategy) {
  if (!strategy) return null;
  const { marks } = strategy;
  const known = new Map(strategy.groups.map((each) => [each.group, each]));
  return {
    ...marks,
    colour: (index, paint) => paint.fill(marks.colour[index]),
    lines: (index) => {
      if (marks.count[index] > 1) return [["groups here", page.format.count(marks.count[index])]];
      const group = known.get(marks.group[index]);
      const name = ["group", page.format.count(marks.group[index])];
      return group ? [name, ["rows of the group", page.format.count(rowsOf(group))]] : [name];
    },
  };
}

// The colours of groups: those that they have on the tree. Groups that are too small for a colour there are grey.
const groupColours = (() => {
  const known = new WeakMap();
  return ({ marks }) => {
    if (!known.has(marks)) {
      const alone = d3.range(marks.group.length).filter((index) => marks.count[index] === 1);
      known.set(marks, new Map(alone.map((index) => [marks.group[index], marks.colour[index]])));
    }
    return known.get(marks);
  };
})();

function groupColour(strategy, group) {
  const colour = groupColours(strategy).get(group);
  return colour === undefined ? 7 : colour;
}

function rowsOf(group) {
  return d3.sum(group.rows, ([lo, hi]) => hi - lo);
}

function tokensOf(group) {
  return d3.sum(group.segments, (segment) => segment.stop - segment.start);
}

// How often a node is read, and by which groups.
function readLines(strategy, mark) {
  if (!strategy) return [];
  const MOST = 6;
  const { times, groups } = strategy.reads;
  const often = times[mark] === 1 ? "once" : `${page.format.fixed(times[mark], 2)} times`;
  const readers = groupsAt(strategy.marks, page.data.drawing.marks, mark).slice(0, MOST);
  const left = groups[mark] - readers.length;
  const named = readers.map((group) => `g${group}`).join(", ");
  const which = readers.length ? `: ${named}${left > 0 ? ` and ${page.format.count(left)} more` : ""}` : "";
  return [["read", `${often}, by ${page.format.counted(groups[mark], "group")}${which}`]];
}

// The groups with a box of their own on a node, in order.
function groupsAt({ start, stop, lo, hi, group, count }, nodes, mark) {
  const found = new Set();
  for (let index = 0; index < group.length; index += 1) {
    const beside = start[index] >= nodes.stop[mark] || stop[index] <= nodes.start[mark];
    const other = lo[index] >= nodes.hi[mark] || hi[index] <= nodes.lo[mark];
    if (count[index] === 1 && !beside && !other) found.add(group[index]);
  }
  return d3.sort(found);
}
