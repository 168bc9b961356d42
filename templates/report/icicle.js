"use strict";

// An icicle of a drawing's marks on a canvas, which can be enlarged and walked by keyboard.
// options:
//   label     what the drawing shows, in words
//   height    CSS pixels; by default enough for the rows
//   layer()   the boxes that fill the marks, {start, stop, lo, hi, count}, with colour(i), name(i) and lines(i);
//             null colours marks by depth
//   lines(i)  further [name, value] lines of a mark's tip
//   marked(i) whether a mark is framed
// Widths are tokens, or even (tokenScale).
// Returns a function that draws it again.
function icicle(host, drawing, options) {
  const { marks } = drawing;
  const MARGIN = { top: 24, left: 46, right: 4, bottom: 4 };
  const TINY = 1; // pixels: nodes below it are counted in words
  const all = { x0: 0, x1: Math.max(drawing.tokens, 1), y0: 0, y1: Math.max(drawing.rows, 1) };
  const walk = walkOf(marks);
  const trail = page.element("span", { class: "where" });
  const back = page.element("button", { type: "button", onclick: () => leave() }, "Zoom out");
  const whole = page.element("button", { type: "button", onclick: () => reset() }, "Whole tree");
  const widths = page.element(
    "select",
    { class: "widths", onchange: () => draw() },
    page.element("option", { value: "tokens" }, "tokens"),
    page.element("option", { value: "even" }, "even"),
  );
  const choice = page.element("label", { class: "choice" }, "Widths ", widths);
  host.append(page.element("div", { class: "controls" }, trail, choice, back, whole));
  const { node: canvas, context, reset: clear } = shapes.canvas(host, options.label);
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "tree drawing");
  const unseen = page.element("p", { class: "note unseen", hidden: true });
  host.append(unseen);
  let view = { ...all };
  let stack = []; // the marks that were enlarged, the last one now
  let focus = -1;
  let size = { width: 0, height: 0 };
  let x = d3.scaleLinear();
  let y = d3.scaleLinear();

  function heightOf() {
    if (options.height) return options.height;
    const narrow = host.clientWidth < 560;
    return Math.min(narrow ? 380 : 540, Math.max(150, MARGIN.top + 20 * drawing.rows));
  }

  function draw() {
    size = clear(heightOf());
    MARGIN.left = rowMargin(context, drawing.rows);
    const across = [MARGIN.left, size.width - MARGIN.right];
    x = tokenScale(marks, [view.x0, view.x1], across, widths.value === "even");
    y = d3.scaleLinear([view.y0, view.y1], [MARGIN.top, size.height - MARGIN.bottom]);
    const paint = shapes.colours();
    const folded = shapes.hatch(context, paint.faint, null);
    const layer = options.layer();
    context.save();
    context.beginPath();
    context.rect(MARGIN.left, MARGIN.top, size.width - MARGIN.left - MARGIN.right, size.height);
    context.clip();
    if (layer) {
      boxes(layer, (index) => layer.colour(index, paint));
      // A box of a layer that stands for several groups has no colour of one of them.
      boxes(layer, (index) => (layer.count[index] > 1 ? folded : null));
    } else {
      boxes(marks, (index) => paint.fill(walk.depth[index]));
    }
    boxes(marks, (index) => (marks.nodes[index] > 1 ? folded : null));
    outlines(paint);
    labels(paint);
    if (layer) groupLabels(layer, paint);
    if (focus >= 0) frame(focus, paint.accent, 3);
    context.restore();
    shapes.edges(context, x, y, { ...size, left: MARGIN.left, top: MARGIN.top, paint, xTicks: x.marks(90) });
    write();
  }

  function boxes(source, fill) {
    for (let index = 0; index < source.start.length; index += 1) {
      const style = fill(index);
      const box = style && boxOf(source, index);
      if (!box) continue;
      context.fillStyle = style;
      context.fillRect(box.left, box.top, box.width, box.height);
    }
  }

  // The box of a mark in pixels; null outside of the view. Boxes are at least a pixel, so nothing disappears.
  function boxOf(source, index) {
    const { start, stop, lo, hi } = source;
    if (stop[index] <= view.x0 || start[index] >= view.x1 || hi[index] <= view.y0 || lo[index] >= view.y1) return null;
    const [left, width] = pixels(x(Math.max(start[index], view.x0)), x(Math.min(stop[index], view.x1)));
    const [top, height] = pixels(y(Math.max(lo[index], view.y0)), y(Math.min(hi[index], view.y1)));
    return { left, top, width, height };
  }

  // Whether a mark is in the view, but narrower or lower than a pixel.
  function isTiny(index) {
    const { start, stop, lo, hi } = marks;
    if (stop[index] <= view.x0 || start[index] >= view.x1 || hi[index] <= view.y0 || lo[index] >= view.y1) return false;
    return x(stop[index]) - x(start[index]) < TINY || y(hi[index]) - y(lo[index]) < TINY;
  }

  function outlines(paint) {
    context.lineWidth = 1.5;
    context.strokeStyle = paint.paper;
    for (let index = 0; index < marks.start.length; index += 1) {
      const box = boxOf(marks, index);
      if (box && box.width > 3 && box.height > 3) context.strokeRect(box.left, box.top, box.width, box.height);
    }
    if (!options.marked) return;
    for (let index = 0; index < marks.start.length; index += 1) {
      if (options.marked(index)) frame(index, paint.mark, 2);
    }
  }

  function frame(index, colour, width) {
    const box = boxOf(marks, index);
    if (!box) return;
    context.strokeStyle = colour;
    context.lineWidth = width;
    const inset = width / 2;
    context.strokeRect(
      box.left + inset,
      box.top + inset,
      Math.max(box.width - width, 1),
      Math.max(box.height - width, 1),
    );
  }

  function labels(paint) {
    context.fillStyle = paint.ink;
    context.textAlign = "left";
    for (let index = 0; index < marks.start.length; index += 1) {
      const box = boxOf(marks, index);
      if (!box || box.height < 15) continue;
      const left = Math.max(box.left, MARGIN.left);
      const room = Math.min(box.left + box.width, size.width) - left - 10;
      if (room < 22) continue;
      const top = Math.max(box.top, MARGIN.top);
      const text = `${nameOf(index)} · ${page.format.counted(marks.tokens[index], "token")}`;
      const short = context.measureText(text).width <= room ? text : nameOf(index);
      if (context.measureText(short).width <= room)
        context.fillText(short, left + 5, top + Math.min(box.height / 2, 11));
    }
  }

  // Names of groups, so that these are told apart without their colours.
  function groupLabels(layer, paint) {
    context.fillStyle = paint.ink;
    context.textAlign = "right";
    context.globalAlpha = 0.7;
    for (let index = 0; index < layer.start.length; index += 1) {
      const box = layer.count[index] === 1 && boxOf(layer, index);
      if (!box || box.height < 32 || box.width < 40) continue;
      const right = Math.min(box.left + box.width, size.width - MARGIN.right);
      const bottom = Math.min(box.top + box.height, size.height - MARGIN.bottom);
      context.fillText(`g${layer.group[index]}`, right - 5, bottom - 9);
    }
    context.globalAlpha = 1;
  }

  function nameOf(index) {
    const number = marks.nodes[index];
    return number === 1 ? `n${marks.node[index]}` : `${page.format.short(number)} nodes`;
  }

  function write() {
    const zoomed = stack.length ? `enlarged: ${nameOf(stack[stack.length - 1])} and the nodes below it` : "whole tree";
    const scope = `tokens ${page.format.count(Math.round(view.x0))} to ${page.format.count(Math.round(view.x1))}`;
    trail.textContent = `${zoomed}; ${scope}`;
    back.disabled = whole.disabled = stack.length === 0;
    const tiny = nodesWhere(marks, isTiny);
    const what = `${page.format.counted(tiny, "node")} ${tiny === 1 ? "is" : "are"} smaller than a pixel here`;
    const remedy = widths.value === "even" ? "enlarge a node" : "enlarge a node, or choose even widths";
    unseen.textContent = `${what}: ${remedy}.`;
    unseen.hidden = tiny === 0;
  }

  // The number of nodes that lie, in part, in the same pixel as a place.
  function nodesAround({ left, top }) {
    const [x0, x1, y0, y1] = [x.invert(left), x.invert(left + TINY), y.invert(top), y.invert(top + TINY)];
    const { start, stop, lo, hi } = marks;
    return nodesWhere(marks, (index) => start[index] < x1 && stop[index] > x0 && lo[index] < y1 && hi[index] > y0);
  }

  function enlarge(index) {
    if (stack[stack.length - 1] === index) return;
    stack.push(index);
    look();
  }

  function leave() {
    stack.pop();
    look();
  }

  function reset() {
    stack = [];
    look();
  }

  // Shows the last enlarged mark with all that is below it.
  function look() {
    const index = stack.length ? stack[stack.length - 1] : -1;
    view = { ...all };
    if (index >= 0) {
      let end = marks.stop[index];
      for (let below = index + 1; below < walk.end[index]; below += 1) end = Math.max(end, marks.stop[below]);
      view = { x0: marks.start[index], x1: end, y0: marks.lo[index], y1: marks.hi[index] };
    }
    page.hideTip();
    draw();
  }

  function markAt(event) {
    const bounds = canvas.getBoundingClientRect();
    const token = x.invert(event.clientX - bounds.left);
    const row = y.invert(event.clientY - bounds.top);
    const layer = options.layer();
    return { mark: boxAt(marks, token, row), box: layer ? boxAt(layer, token, row) : -1 };
  }

  function tell(mark, box, left, top) {
    const layer = options.layer();
    const lines = [
      ["tokens", page.format.count(marks.tokens[mark])],
      ["rows", `${page.format.count(marks.hi[mark] - marks.lo[mark])}: ${marks.lo[mark]} to ${marks.hi[mark] - 1}`],
      ["KV", page.format.bytes(marks.tokens[mark] * drawing.kv_token_bytes)],
      ...(options.lines ? options.lines(mark) : []),
      ...(layer && box >= 0 ? layer.lines(box) : []),
    ];
    if (isTiny(mark)) lines.push(["in this pixel", page.format.counted(nodesAround(boxOf(marks, mark)), "node")]);
    const number = marks.nodes[mark];
    const title = number === 1 ? `node ${marks.node[mark]}` : `${page.format.count(number)} nodes, folded`;
    page.showTip(title, lines, left, top);
  }

  // Moves the focus to a mark, and shows its tip beside it.
  function attend(index) {
    if (index < 0 || index >= marks.start.length) return;
    focus = index;
    if (!boxOf(marks, index)) reset();
    draw();
    const box = boxOf(marks, index);
    const bounds = canvas.getBoundingClientRect();
    const layer = options.layer();
    const boxIndex = layer ? boxAt(layer, marks.start[index], marks.lo[index]) : -1;
    tell(index, boxIndex, bounds.left + Math.max(box.left, MARGIN.left), bounds.top + Math.max(box.top, MARGIN.top));
  }

  const keys = {
    ArrowRight: () => attend(focus < 0 ? 0 : walk.child[focus]),
    ArrowLeft: () => attend(focus < 0 ? 0 : marks.parent[focus]),
    ArrowDown: () => attend(focus < 0 ? 0 : walk.beside(focus, 1)),
    ArrowUp: () => attend(focus < 0 ? 0 : walk.beside(focus, -1)),
    Home: () => attend(0),
    Enter: () => focus >= 0 && enlarge(focus),
    Escape: () => leave(),
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  canvas.addEventListener("pointermove", (event) => {
    const { mark, box } = markAt(event);
    if (mark >= 0) tell(mark, box, event.clientX, event.clientY);
    else page.hideTip();
  });
  canvas.addEventListener("pointerleave", () => page.hideTip());
  canvas.addEventListener("blur", () => {
    focus = -1;
    page.hideTip();
    draw();
  });
  canvas.addEventListener("click", (event) => {
    const { mark, box } = markAt(event);
    if (mark < 0) return;
    enlarge(mark);
    if (event.pointerType === "touch") tell(mark, box, event.clientX, event.clientY);
  });
  return draw;
}
