"use strict";

// Stacked bars, and the list that explains their parts.

// A bar of parts {name, value, colour, hatched}. `most` is the value of the full width; a longer bar ends in an arrow.
function stackedBar(parts, most, options = {}) {
  const height = options.height || 16;
  const total = d3.sum(parts, (part) => part.value);
  const bar = page.element("div", { class: "bar", role: "img", "aria-label": options.label || "" });
  bar.style.height = `${height}px`;
  let left = 0;
  for (const part of parts) {
    if (part.value <= 0) continue;
    const from = Math.min(left / most, 1);
    left += part.value;
    const piece = page.element("span", { class: part.hatched ? "piece hatched" : "piece" });
    piece.style.left = `${100 * from}%`;
    piece.style.width = `${100 * Math.max(Math.min(left / most, 1) - from, 0)}%`;
    piece.style.backgroundColor = `var(--fill${part.colour})`;
    bar.append(piece);
  }
  if (total > most) bar.append(page.element("span", { class: "beyond" }, "▸"));
  return bar;
}

// The width that bars share: the largest total that is at most `times` the smallest one.
function sharedWidth(totals, times = 6) {
  const least = d3.min(totals.filter((total) => total > 0)) || 1;
  return d3.max(totals.filter((total) => total <= times * least)) || least;
}

function swatches(parts) {
  const list = page.element("ul", { class: "swatches" });
  for (const part of parts) {
    const box = page.element("span", { class: part.hatched ? "swatch hatched" : "swatch" });
    box.style.backgroundColor = `var(--fill${part.colour})`;
    list.append(page.element("li", {}, box, part.name));
  }
  return list;
}

// Shows a tip over an element, for the pointer and for the focus.
function tipOver(node, title, lines) {
  const show = (x, y) => page.showTip(title, lines(), x, y);
  node.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
  node.addEventListener("pointerleave", () => page.hideTip());
  node.addEventListener("focus", () => {
    const bounds = node.getBoundingClientRect();
    show(bounds.left + 12, bounds.bottom - 8);
  });
  node.addEventListener("blur", () => page.hideTip());
}
