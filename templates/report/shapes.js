"use strict";

// Canvases that are sharp on every screen, colours of the style sheet, hatches, and axes.
const shapes = (() => {
  const COLOURS = 8;

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  // The colours of a drawing, read once for each time that it is drawn.
  function colours() {
    const fills = d3.range(COLOURS).map((index) => colour(`fill${index}`));
    return {
      ink: colour("ink"),
      faint: colour("faint"),
      line: colour("line"),
      paper: colour("paper"),
      accent: colour("accent"),
      mark: colour("mark"),
      fill: (index) => fills[((index % COLOURS) + COLOURS) % COLOURS],
    };
  }

  // A canvas as wide as its host. `label` says what it shows, for those who do not see it.
  function canvas(host, label) {
    const node = page.element("canvas", { tabindex: 0, role: "img", "aria-label": label });
    host.append(node);
    const context = node.getContext("2d");
    // Sets the size in CSS pixels and clears; the context's unit is one of these.
    function reset(height) {
      const width = host.clientWidth;
      const density = window.devicePixelRatio || 1;
      node.width = Math.round(width * density);
      node.height = Math.round(height * density);
      node.style.height = `${height}px`;
      context.setTransform(density, 0, 0, density, 0, 0);
      context.clearRect(0, 0, width, height);
      context.font = "12px system-ui, sans-serif";
      context.textBaseline = "middle";
      return { width, height };
    }
    return { node, context, reset };
  }

  // A fill of slanted lines, which stands beside a colour so that meaning never hangs on colour alone.
  function hatch(context, ink, paper, gap = 6) {
    const tile = document.createElement("canvas");
    const density = window.devicePixelRatio || 1;
    tile.width = tile.height = gap * density;
    const brush = tile.getContext("2d");
    brush.scale(density, density);
    if (paper) {
      brush.fillStyle = paper;
      brush.fillRect(0, 0, gap, gap);
    }
    brush.strokeStyle = ink;
    brush.lineWidth = 1;
    brush.beginPath();
    for (const shift of [-gap, 0, gap]) {
      brush.moveTo(shift, gap);
      brush.lineTo(shift + gap, 0);
    }
    brush.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / density));
    return pattern;
  }

  // Ticks of whole numbers for an axis of this many pixels.
  function ticks(scale, pixels, gap) {
    return scale.ticks(Math.max(2, Math.floor(pixels / gap))).filter(Number.isInteger);
  }

  // Axes of a canvas along its upper and left edges, with whole numbers. xTicks: those of the upper one.
  function edges(context, x, y, { width, height, left, top, paint, xTicks }) {
    context.fillStyle = paint.faint;
    context.strokeStyle = paint.line;
    context.lineWidth = 1;
    context.beginPath();
    context.textAlign = "center";
    for (const tick of xTicks || ticks(x, width - left, 90)) {
      const place = x(tick);
      context.moveTo(place, top - 5);
      context.lineTo(place, top);
      const text = page.format.count(tick);
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(place, left + half - 4), width - half), top - 12);
    }
    context.textAlign = "right";
    for (const tick of ticks(y, height - top, 40)) {
      const place = y(tick);
      context.moveTo(left - 5, place);
      context.lineTo(left, place);
      context.fillText(page.format.count(tick), left - 7, Math.min(Math.max(place, top + 6), height - 7));
    }
    context.stroke();
    context.textAlign = "left";
    context.fillText("row", 2, top - 12);
  }

  function svg(width, height, label) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [name, value] of Object.entries({ width, height, role: "img", "aria-label": label }))
      node.setAttribute(name, value);
    return node;
  }

  return { canvas, colour, colours, edges, hatch, svg, ticks };
})();
