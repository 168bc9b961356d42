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

// The colour of a group: the one that it has on the tree.
function groupColour(strategy, group) {
  const index = strategy.marks.group.findIndex((each, place) => each === group && strategy.marks.count[place] === 1);
  return index < 0 ? 7 : strategy.marks.colour[index];
}

function rowsOf(group) {
  return d3.sum(group.rows, ([lo, hi]) => hi - lo);
}

function tokensOf(group) {
  return d3.sum(group.segments, (segment) => segment.stop - segment.start);
}

function readLines(strategy, mark) {
  if (!strategy) return [];
  const { times, groups } = strategy.reads;
  const often = times[mark] === 1 ? "once" : `${page.format.fixed(times[mark], 2)} times`;
  return [["read", `${often}, by ${page.format.counted(groups[mark], "group")}`]];
}
