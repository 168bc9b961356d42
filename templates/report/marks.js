"use strict";

// The last mark at a token and a row; -1 where there is none. Marks below others come later.
function boxAt(marks, token, row) {
  const { start, stop, lo, hi } = marks;
  for (let index = start.length - 1; index >= 0; index -= 1) {
    if (start[index] <= token && token < stop[index] && lo[index] <= row && row < hi[index]) return index;
  }
  return -1;
}

// How keys walk marks in depth-first order: depth, the first child, and the end of the marks below each mark.
function walkOf(marks) {
  const count = marks.parent.length;
  const depth = new Array(count).fill(0);
  const child = new Array(count).fill(-1);
  const end = d3.range(1, count + 1);
  for (let index = 0; index < count; index += 1) {
    const parent = marks.parent[index];
    if (parent < 0) continue;
    depth[index] = depth[parent] + 1;
    if (child[parent] < 0) child[parent] = index;
  }
  for (let index = count - 1; index >= 0; index -= 1) {
    const parent = marks.parent[index];
    if (parent >= 0) end[parent] = Math.max(end[parent], end[index]);
  }
  // The next mark of the same depth in a direction, first among siblings and then among cousins.
  function beside(index, step) {
    for (let place = index + step; place >= 0 && place < count; place += step) {
      if (depth[place] === depth[index]) return place;
    }
    return index;
  }
  return { depth, child, end, beside };
}
