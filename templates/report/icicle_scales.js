"use strict";

// Scales of icicles: from tokens and rows to pixels, and what is too small to see on them.

// The room for numbers of rows on the left of a drawing.
function rowMargin(context, rows) {
  return Math.max(46, Math.ceil(context.measureText(page.format.count(rows)).width) + 10);
}

// A scale of tokens from domain [x0, x1] to the pixels of range. Even scales give all stretches between neighbouring
// ends of boxes the same width, so that nodes of few tokens are seen beside long ones. scale.marks(gap) are its ticks.
function tokenScale(marks, [x0, x1], [left, right], even) {
  if (!even) {
    const scale = d3.scaleLinear([x0, x1], [left, right]);
    scale.marks = (gap) => shapes.ticks(scale, right - left, gap);
    return scale;
  }
  const ends = new Set([x0, x1]);
  for (const column of [marks.start, marks.stop]) for (const end of column) if (x0 < end && end < x1) ends.add(end);
  const bounds = Float64Array.from(ends).sort();
  const step = (right - left) / (bounds.length - 1);
  const scale = d3.scaleLinear(Array.from(bounds), d3.range(bounds.length).map((place) => left + place * step));
  scale.marks = (gap) => Array.from(bounds).filter((_, place) => place % Math.ceil(gap / step) === 0);
  return scale;
}

// Edges of pixels, so that boxes side by side leave no seams, and none has less than a pixel.
function pixels(from, to) {
  const density = window.devicePixelRatio || 1;
  const first = Math.round(from * density);
  return [first / density, Math.max(Math.round(to * density) - first, 1) / density];
}

// The number of nodes of the marks whose places satisfy a condition. A node in several marks counts once.
function nodesWhere(marks, condition) {
  let [sum, last] = [0, -1];
  for (let index = 0; index < marks.node.length; index += 1) {
    if (marks.node[index] === last || !condition(index)) continue;
    sum += marks.nodes[index];
    last = marks.node[index];
  }
  return sum;
}
