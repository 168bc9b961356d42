"use strict";

// What all panels share: the data, the strategy that is shown, text with units, the tip, and the frame of the page.
// A panel is a file NAME_panel.js that calls page.panel({name, title, lead, shows, draw}):
//   shows(data)  whether the data has what it draws
//   draw(host)   fills its element, and returns a function that draws it again: after another strategy was selected,
//                and after a change of the size or the colours of the page
const page = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  for (const each of data.strategies || [])
    each.groups.forEach((group, place) => (group.group = each.shown_groups[place]));
  const root = document.documentElement;
  const panels = [];
  const redraws = [];
  let selected = 0;

  // Elements. Text is always a text node, so data is never read as markup.
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined).map(asNode));
    return made;
  }
  const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));

  // Numbers with units, as the command line prints them.
  const whole = d3.format(",d");
  // Digits as Python writes them: where two texts are as near, the even one, and not the larger one.
  function fixed(value, digits) {
    const halves = Math.abs(value) * 2 ** (digits + 1);
    if (!Number.isInteger(halves) || halves % 2 === 0) return value.toFixed(digits);
    const below = Math.floor(value * 10 ** digits);
    return ((below + Math.abs(below % 2)) / 10 ** digits).toFixed(digits);
  }
  function scaled(amount, units, step) {
    let place = 0;
    while (Math.abs(amount) >= step && place < units.length - 1) {
      amount /= step;
      place += 1;
    }
    return `${place ? fixed(amount, 1) : whole(amount)} ${units[place]}`.trim();
  }
  const format = {
    count: whole,
    fixed,
    short: (amount) => scaled(amount, ["", "k", "M", "G", "T"], 1000),
    bytes: (amount) => scaled(amount, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024),
    flops: (amount) => scaled(amount, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"], 1000),
    time: (us) => (us < 10000 ? `${fixed(us, 1)} us` : `${fixed(us / 1000, 1)} ms`),
    percent: (part) => `${fixed(100 * part, 1)} %`,
    ratio: (value) => `${fixed(value, 2)}x`,
    counted: (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`,
    range: (lo, hi, noun) => (hi - lo === 1 ? `${noun} ${whole(lo)}` : `${noun}s ${whole(lo)} to ${whole(hi - 1)}`),
  };

  // The tip: a box of [name, value] lines beside the pointer or the focused mark. Screen readers hear it.
  const tip = element("div", { id: "tip", role: "status", "aria-live": "polite", hidden: true });
  function showTip(title, lines, x, y) {
    const list = element("dl");
    for (const [name, value] of lines) list.append(element("dt", {}, name), element("dd", {}, value));
    tip.replaceChildren(element("strong", {}, title), list);
    tip.hidden = false;
    const room = root.clientWidth - tip.offsetWidth - 8;
    const above = y + tip.offsetHeight + 24 > root.clientHeight;
    tip.style.left = `${Math.max(8, Math.min(x + 14, room))}px`;
    tip.style.top = `${above ? Math.max(8, y - tip.offsetHeight - 12) : y + 16}px`;
  }
  function hideTip() {
    tip.hidden = true;
  }

  function redraw() {
    hideTip();
    for (const each of redraws) each();
  }

  // The strategy that the panels show; -1 entries of data without strategies are never asked for.
  function select(index) {
    selected = index;
    const choice = document.getElementById("strategy");
    if (choice) choice.value = String(index);
    redraw();
  }

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  function toggleTheme(event) {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameToggle(event.currentTarget);
    redraw();
  }
  function nameToggle(button) {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
  }

  function toolbar(shown) {
    const links = shown.map((each) => element("a", { href: `#${each.name}` }, each.title));
    const toggle = element("button", { type: "button", id: "theme", onclick: toggleTheme });
    nameToggle(toggle);
    dark.addEventListener("change", () => {
      nameToggle(toggle);
      redraw();
    });
    const parts = [element("nav", { "aria-label": "Panels" }, ...links)];
    const strategies = data.strategies || [];
    if (strategies.length > 1 && strategies[0].rank) {
      const choice = element("select", { id: "strategy", onchange: (event) => select(Number(event.target.value)) });
      strategies.forEach((each, index) => choice.append(element("option", { value: index }, each.summary)));
      parts.push(element("label", { class: "choice" }, "Strategy ", choice));
    }
    return element("div", { id: "toolbar" }, ...parts, toggle);
  }

  function start() {
    const shown = panels.filter((each) => each.shows(data));
    document.getElementById("head").after(toolbar(shown));
    document.body.append(tip);
    for (const each of shown) {
      const body = element("div", { class: "body" });
      const heading = element("h2", { id: `${each.name}-title` }, each.title);
      const lead = each.lead ? element("p", { class: "lead" }, each.lead) : null;
      const attributes = { id: each.name, class: "panel", "aria-labelledby": `${each.name}-title` };
      document.getElementById("panels").append(element("section", attributes, heading, lead, body));
      redraws.push(each.draw(body));
    }
    selected = data.best_strategy || 0;
    select(selected);
    let width = root.clientWidth;
    window.addEventListener("resize", () => {
      if (root.clientWidth !== width) redraw();
      width = root.clientWidth;
    });
    window.addEventListener("scroll", hideTip, { passive: true });
    printing();
  }

  // Paper is white: canvases are drawn in light colours for it.
  function printing() {
    let theme;
    window.addEventListener("beforeprint", () => {
      theme = root.dataset.theme;
      root.dataset.theme = "light";
      redraw();
    });
    window.addEventListener("afterprint", () => {
      if (theme) root.dataset.theme = theme;
      else delete root.dataset.theme;
      redraw();
    });
  }

  document.addEventListener("DOMContentLoaded", start);
  return {
    data,
    element,
    format,
    hideTip,
    showTip,
    redraw,
    select,
    panel: (definition) => panels.push(definition),
    get strategy() {
      return (data.strategies || [])[selected];
    },
    get selected() {
      return selected;
    },
  };
})();
