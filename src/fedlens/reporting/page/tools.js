"use strict";

// Elements are created, never parsed: text from records cannot become markup.
function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
const html = (tag, attributes = {}, ...children) =>
  put(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const NONE = "–";
const minus = (text) => text.replace("-", "−");
const fixed = (value, digits = 2) => (value === null ? NONE : minus(rounded(value, digits).replace(/^-(?=[0.]*$)/, "")));
const short = (value) => minus(Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4))));
const counted = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const within = (mean, half) => fixed(mean) + (half === null ? "" : ` ± ${fixed(half)}`);

// Rounds as the tables do: an exact half to the even digit, where toFixed rounds up.
function rounded(value, digits) {
  const text = value.toFixed(digits), rest = value.toFixed(digits + 20).slice(-20);
  return /^50*$/.test(rest) && /[13579]$/.test(text) ? value.toFixed(digits + 20).slice(0, -20) : text;
}

// About five round numbers that cover a range, at least `least` apart, with their texts.
function ticks(low, high, wanted = 5, least = 0) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const round = power * [10, 5, 2, 1].find((factor) => rough / power >= factor / Math.SQRT2);
  const step = Math.max(round, least);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const marks = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) {
    marks.push({ at: place * step, text: minus((place * step).toFixed(digits)) });
  }
  return marks;
}

// The range of some numbers with a margin, never empty.
function range(numbers, room = 0.06) {
  const low = Math.min(...numbers), high = Math.max(...numbers);
  const margin = (high - low) * room || Math.abs(high) * 0.05 || 1;
  return [low - margin, high + margin];
}

// Okabe and Ito's colours are in the style sheet; markers and dashes distinguish lines without them.
const COLOURS = 7, INK = 5;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "1 4", "12 4"];
const MARKERS = [
  "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0Z",
  "M-3.2 -3.2H3.2V3.2H-3.2Z",
  "M0 -4.2L4 3H-4Z",
  "M0 -4.6L4.6 0L0 4.6L-4.6 0Z",
  "M0 4.2L4 -3H-4Z",
  "M-1.5 -4.2H1.5V-1.5H4.2V1.5H1.5V4.2H-1.5V1.5H-4.2V-1.5H-1.5Z",
  "M0 -5L1.4 -1.6L5 -1.5L2.2 0.8L3.1 4.4L0 2.3L-3.1 4.4L-2.2 0.8L-5 -1.5L-1.4 -1.6Z",
];
const look = (colour, dash) => ({ colour: colour % COLOURS, dash: dash % DASHES.length });

function swatch({ colour, dash }) {
  return svg("svg", { class: "swatch", viewBox: "0 0 30 12", "aria-hidden": "true",
    style: `--c:var(--c${colour})` },
    svg("path", { d: "M1 6H29", class: "line", "stroke-dasharray": DASHES[dash] }),
    svg("path", { d: MARKERS[colour], class: "marker", transform: "translate(15 6)" }));
}

// Draws when the element has a width, and again when the width changes.
function drawn(place, draw) {
  let width = 0;
  const again = () => {
    const now = Math.floor(place.clientWidth);
    if (now && now !== width) { width = now; draw(width); }
  };
  draw(640);
  new ResizeObserver(() => requestAnimationFrame(again)).observe(place);
}

// The same numbers as a table, made when it is opened.
function tableOf(caption, heads, rows) {
  const details = html("details", { class: "more" }, html("summary", {}, "Values as a table"));
  details.addEventListener("toggle", () => {
    if (details.querySelector("table")) return;
    details.append(html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      html("table", {}, html("caption", { class: "unseen" }, caption),
        html("thead", {}, html("tr", {},
          ...heads.map((head, i) => html("th", { scope: "col", class: i ? "right" : null }, head)))),
        html("tbody", {}, ...rows().map(([first, ...rest]) => html("tr", {},
          html("th", { scope: "row" }, first),
          ...rest.map((value) => html("td", { class: "right" }, value))))))));
  });
  return details;
}
