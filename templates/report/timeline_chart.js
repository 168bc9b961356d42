"use strict";

// Timelines on one canvas, one below the other, which can be enlarged and walked by keyboard.
// timelines(): the timelines to draw, {name, sms, total_us, tail_us, launches, blocks}.
// colourOf(group): the number of a group's colour.
// Returns {draw, reset}: reset forgets what is enlarged.
function timelineDrawing(host, timelines, colourOf) {
  const { element, format } = page;
  const MARGIN = { left: 54, right: 8, top: 22, bottom: 24 };
  const where = element("span", { class: "where" });
  const colouring = element(
    "select",
    { id: "timeline-colours", onchange: () => draw() },
    element("option", { value: "launch" }, "launch"),
    element("option", { value: "group" }, "group"),
  );
  const out = element("button", { type: "button", onclick: () => leave() }, "Zoom out");
  const whole = element("button", { type: "button", onclick: () => show([]) }, "Whole timeline");
  const choice = element("label", { class: "choice" }, "Colour by ", colouring);
  host.append(element("div", { class: "controls" }, where, choice, out, whole));
  const { node: canvas, context, reset: clear } = shapes.canvas(host, "Thread blocks on SMs over time");
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "timeline");
  const legend = element("div");
  host.append(legend);
  let stack = []; // enlarged views, the last one now
  let focus = null; // {part, index}
  let parts = []; // what was drawn last: timelines with their places on the canvas
  let x = d3.scaleLinear();

  function all() {
    const shown = timelines();
    const [end, sms] = ["total_us", "sms"].map((name) => d3.max(shown, (each) => each[name]) || 1);
    return { t0: 0, t1: end, s0: 0, s1: sms };
  }

  const view = () => stack[stack.length - 1] || all();

  function draw() {
    const shown = timelines();
    const { t0, t1, s0, s1 } = view();
    const each = Math.max(150, Math.min(host.clientWidth < 560 ? 200 : 264, 12 * (s1 - s0)));
    const size = clear(shown.length * (each + MARGIN.top) + MARGIN.bottom);
    x = d3.scaleLinear([t0, t1], [MARGIN.left, size.width - MARGIN.right]);
    const paint = shapes.colours();
    const [tailHatch, folded] = [paint.line, paint.faint].map((ink) => shapes.hatch(context, ink, null));
    parts = shown.map((timeline, index) => {
      const top = MARGIN.top + index * (each + MARGIN.top);
      return { timeline, top, y: d3.scaleLinear([s0, s1], [top, top + each]), lanes: blockLanes(timeline) };
    });
    for (const part of parts) {
      frame(part, size, paint);
      context.save();
      context.beginPath();
      context.rect(MARGIN.left, part.top, size.width - MARGIN.left - MARGIN.right, each);
      context.clip();
      tail(part, tailHatch);
      for (let index = 0; index < part.timeline.blocks.launch.length; index += 1) block(part, index, paint, folded);
      if (focus && parts[focus.part] === part) outline(part, focus.index, paint);
      context.restore();
    }
    axis(size, paint);
    write(shown);
  }

  function frame(part, size, paint) {
    const { timeline, top, y } = part;
    const bottom = y.range()[1];
    context.strokeStyle = paint.line;
    context.lineWidth = 1;
    context.strokeRect(MARGIN.left, top, size.width - MARGIN.left - MARGIN.right, bottom - top);
    context.fillStyle = paint.ink;
    context.textAlign = "left";
    context.fillText(timeline.name, MARGIN.left, top - 10);
    const words = `tail ${format.time(timeline.tail_us)}`;
    const end = endOf(timeline);
    const left = Math.max(MARGIN.left + 80, x(end - timeline.tail_us));
    if (x(end) > MARGIN.left && left + context.measureText(words).width < size.width) {
      context.fillStyle = paint.faint;
      context.fillText(words, left, top - 10);
    }
    const starting = "starting";
    const room = x(timeline.launches[0].start_us) - Math.max(x(0), MARGIN.left);
    context.fillStyle = paint.faint;
    if (x(0) >= MARGIN.left && context.measureText(starting).width + 12 < room) {
      context.fillText(starting, x(0) + 6, top + 12);
    }
    context.textAlign = "right";
    for (const tick of shapes.ticks(y, bottom - top, 44)) {
      context.fillText(`SM ${tick}`, MARGIN.left - 6, Math.min(Math.max(y(tick), top + 6), bottom - 6));
    }
  }

  const endOf = (timeline) => d3.max(timeline.blocks.end_us) || 0;

  function tail(part, pattern) {
    const end = endOf(part.timeline);
    const [top, bottom] = part.y.range();
    context.fillStyle = pattern;
    context.fillRect(x(end - part.timeline.tail_us), top, x(end) - x(end - part.timeline.tail_us), bottom - top);
  }

  function block(part, index, paint, folded) {
    const box = blockBox(part, index, x);
    if (!box) return;
    const { blocks } = part.timeline;
    const merges = blocks.group[index] < 0;
    const number = colouring.value === "group" ? (merges ? 7 : colourOf(blocks.group[index])) : blocks.launch[index];
    const gap = box.height > 3 ? 0.5 : 0;
    const side = box.width > 4 ? 0.5 : 0;
    context.fillStyle = paint.fill(number);
    context.fillRect(box.left + side, box.top + gap, box.width - 2 * side, box.height - 2 * gap);
    if (blocks.items[index] > 1 || merges) {
      context.fillStyle = folded;
      context.fillRect(box.left, box.top, box.width, box.height);
    }
    if (box.height > 13 && box.width > 34) {
      context.fillStyle = paint.ink;
      context.textAlign = "left";
      const text = blockName(blocks, index);
      const middle = box.top + box.height / 2;
      if (context.measureText(text).width < box.width - 6) context.fillText(text, box.left + 4, middle);
    }
  }

  function outline(part, index, paint) {
    const box = blockBox(part, index, x);
    if (!box) return;
    context.strokeStyle = paint.accent;
    context.lineWidth = 2;
    context.strokeRect(box.left - 1, box.top - 1, Math.max(box.width, 3) + 2, Math.max(box.height, 3) + 2);
  }

  function axis(size, paint) {
    const bottom = size.height - MARGIN.bottom;
    context.fillStyle = paint.faint;
    context.textAlign = "center";
    for (const tick of x.ticks(Math.max(2, Math.floor(size.width / 110)))) {
      const text = `${tick} us`;
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(x(tick), MARGIN.left), size.width - half - 2), bottom + 14);
    }
  }

  function write(shown) {
    const { t0, t1, s0, s1 } = view();
    const scope = `${t0.toFixed(1)} to ${t1.toFixed(1)} us, SMs ${Math.round(s0)} to ${Math.round(s1) - 1}`;
    where.textContent = `${stack.length ? "enlarged" : "whole timeline"}: ${scope}`;
    out.disabled = whole.disabled = stack.length === 0;
    const launches = shown.length ? shown[0].launches : [];
    const named = launches.map(({ name }, index) => ({ name, colour: index % 8, hatched: name === "merge" }));
    const grouped = page.element("p", { class: "note" }, "Colours are those of the groups on the tree.");
    legend.replaceChildren(colouring.value === "group" ? grouped : swatches(named));
  }

  function tell({ timeline }, index, left, top) {
    page.showTip(blockName(timeline.blocks, index), blockLines(timeline, index), left, top);
  }

  // The block at a place of the canvas: {part, index}, or null.
  function blockAt(event) {
    const bounds = canvas.getBoundingClientRect();
    const [left, top] = [event.clientX - bounds.left, event.clientY - bounds.top];
    for (const [number, part] of parts.entries()) {
      const [low, high] = part.y.range();
      if (top < low || top >= high) continue;
      const sm = Math.floor(part.y.invert(top));
      for (let index = part.timeline.blocks.sm.length - 1; index >= 0; index -= 1) {
        if (part.timeline.blocks.sm[index] !== sm) continue;
        const box = blockBox(part, index, x);
        if (!box || left < box.left - 1 || left > box.left + box.width + 1) continue;
        if (box.top <= top && top <= box.top + box.height) return { part: number, index };
      }
    }
    return null;
  }

  function show(views) {
    stack = views;
    page.hideTip();
    draw();
  }

  const leave = () => show(stack.slice(0, -1));

  // Shows a quarter of the time, and of the SMs, around a point of both.
  function enlarge(time, sm) {
    const { t0, t1, s0, s1 } = view();
    const { s1: last } = all();
    const duration = (t1 - t0) / 4;
    const count = Math.min(Math.max(8, Math.ceil((s1 - s0) / 4)), last);
    const start = Math.min(Math.max(time - duration / 2, t0), t1 - duration);
    const first = Math.round(Math.min(Math.max(sm - count / 2, 0), last - count));
    show([...stack, { t0: start, t1: start + duration, s0: first, s1: first + count }]);
  }

  // Moves the focus to a block, and shows its tip beside it.
  function attend(next) {
    if (!next) return;
    focus = next;
    if (!blockBox(parts[next.part], next.index, x)) stack = [];
    draw();
    const box = blockBox(parts[next.part], next.index, x);
    const bounds = canvas.getBoundingClientRect();
    if (box) tell(parts[next.part], next.index, bounds.left + Math.max(box.left, MARGIN.left), bounds.top + box.top);
  }

  const firstBlock = () => (parts.length ? { part: 0, index: nearestBlock(parts[0].timeline.blocks, 0, 0) } : null);

  function along(step) {
    if (!focus) return firstBlock();
    const index = blockAlong(parts[focus.part].timeline.blocks, focus.index, step);
    return index === undefined ? null : { part: focus.part, index };
  }

  // Beyond the last SM follows the next timeline.
  function across(step) {
    if (!focus) return firstBlock();
    const { blocks } = parts[focus.part].timeline;
    const index = blockAcross(blocks, focus.index, step);
    if (index !== undefined) return { part: focus.part, index };
    const other = parts[focus.part + step];
    if (!other) return null;
    const edge = step > 0 ? 0 : other.timeline.sms - 1;
    return { part: focus.part + step, index: nearestBlock(other.timeline.blocks, edge, blocks.start_us[focus.index]) };
  }

  const keys = {
    ArrowRight: () => attend(along(1)),
    ArrowLeft: () => attend(along(-1)),
    ArrowDown: () => attend(across(1)),
    ArrowUp: () => attend(across(-1)),
    Home: () => attend(firstBlock()),
    Enter: () => {
      if (!focus) return;
      const { blocks } = parts[focus.part].timeline;
      enlarge((blocks.start_us[focus.index] + blocks.end_us[focus.index]) / 2, blocks.sm[focus.index]);
    },
    Escape: () => leave(),
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  canvas.addEventListener("pointermove", (event) => {
    const found = blockAt(event);
    if (found) tell(parts[found.part], found.index, event.clientX, event.clientY);
    else page.hideTip();
  });
  canvas.addEventListener("pointerleave", () => page.hideTip());
  canvas.addEventListener("blur", () => {
    focus = null;
    page.hideTip();
    draw();
  });
  canvas.addEventListener("click", (event) => {
    const bounds = canvas.getBoundingClientRect();
    const top = event.clientY - bounds.top;
    const part = parts.find(({ y }) => y.range()[0] <= top && top < y.range()[1]);
    if (!part) return;
    const found = blockAt(event);
    enlarge(x.invert(event.clientX - bounds.left), part.y.invert(top));
    if (event.pointerType === "touch" && found) tell(parts[found.part], found.index, event.clientX, event.clientY);
  });
  return {
    draw,
    reset: () => {
      stack = [];
      focus = null;
    },
  };
}
