// Lines over a shared axis. `series`: {label, note, look, x: {axis: [...]}, y: {value: [...]}, half}.
// The legend shows and hides lines, and shows their values at the pointer.
function lineChart(host, { title, series, axes, values, marks = [], groups = [], key = "" }) {
  const offered = axes.filter((axis) => series.some((one) => one.x[axis.key].length));
  let axis = offered[0], value = values[0], at = null;
  const crowded = series.length > 8 && groups.length > 1;
  const shown = new Set(crowded ? groups[0].members : series.keys());

  const plot = html("div", { class: "plot", tabindex: "0", role: "group",
    "aria-label": `${title}. Use the left and right arrow keys to read values.` });
  const reading = html("p", { class: "reading" });
  const buttons = series.map((one, i) => {
    const button = html("button", { type: "button", class: "curve" }, swatch(one.look),
      html("span", { class: "name" }, one.label, one.note ? html("small", {}, ` ${one.note}`) : ""),
      html("span", { class: "value" }));
    button.addEventListener("click", () => { shown.has(i) ? shown.delete(i) : shown.add(i); redraw(); });
    return button;
  });
  const only = (label, members) => {
    const button = html("button", { type: "button" }, label);
    button.addEventListener("click", () => { shown.clear(); members.forEach((i) => shown.add(i)); redraw(); });
    return button;
  };
  const sets = html("div", { class: "sets", role: "group", "aria-label": "Which curves" });
  if (series.length > 1) {
    sets.append(only("all", [...series.keys()]), only("none", []));
    groups.forEach((group) => sets.append(only(group.label, group.members)));
  }
  const controls = html("div", { class: "controls" },
    choice("y", values, (picked) => { value = picked; }),
    choice("x", offered, (picked) => { axis = picked; at = null; }));
  host.append(controls, html("div", { class: "drawn" }, plot,
    html("div", { class: "legend" }, reading, sets, ...buttons)));

  function choice(name, options, pick) {
    if (options.length < 2) return "";
    const group = html("div", { class: "choice-of", role: "group", "aria-label": `${name} axis` });
    options.forEach((option, i) => {
      const button = html("button", { type: "button", "aria-pressed": i === 0 }, option.label);
      button.addEventListener("click", () => {
        pick(option);
        for (const other of group.children) other.setAttribute("aria-pressed", other === button);
        redraw();
      });
      group.append(button);
    });
    return group;
  }

  // The points of a line on the chosen axes; a line without this axis has none.
  function points(one) {
    const xs = one.x[axis.key], ys = one.y[value.key], halves = one.half?.[value.key];
    return xs.map((x, i) => ({ x, y: ys[i], half: halves ? halves[i] : null }))
      .filter((point) => point.y !== null);
  }

  let place = null; // scales and points of the drawing, to read values from
  let size = 640;
  function redraw() {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", shown.has(i)));
    const visible = series.map((one, i) => ({ ...one, i, points: shown.has(i) ? points(one) : [] }))
      .filter((one) => one.points.length);
    if (!visible.length) {
      place = null;
      plot.replaceChildren(html("p", { class: "empty" }, "No curve is shown: choose one that has these values."));
      read();
      return;
    }
    const drawnMarks = marks.filter((mark) => mark.value === value.key && mark.y !== null);
    const all = visible.flatMap((one) => one.points);
    const [right, top, bottom] = [14, 12, 42];
    const height = Math.round(Math.min(400, Math.max(230, size * 0.56)));
    const [x0, x1] = range([...all, ...drawnMarks].map((point) => point.x), 0.02);
    const [y0, y1] = range([...all, ...drawnMarks].flatMap(({ y, half }) => [y - (half ?? 0), y + (half ?? 0)]));
    const marked = ticks(y0, y1), left = 34 + 7 * Math.max(...marked.map(({ text }) => text.length));
    const px = (x) => left + (x - x0) / (x1 - x0) * (size - left - right);
    const py = (y) => height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom);
    const summary = `${value.label} over ${axis.label}: ${counted(visible.length, "curve")}. `
      + visible.map((one) => `${one.label} ends at ${fixed(one.points.at(-1).y, value.digits)}`).join("; ");
    const picture = svg("svg", { viewBox: `0 0 ${size} ${height}`, role: "img" },
      svg("title", {}, title), svg("desc", {}, summary));
    for (const { at: y, text } of marked) {
      picture.append(svg("path", { class: "rule", d: `M${left} ${py(y)}H${size - right}` }),
        svg("text", { x: left - 7, y: py(y) + 4, "text-anchor": "end" }, text));
    }
    const whole = all.every((point) => Number.isInteger(point.x)) ? 1 : 0; // there is no half round
    for (const { at: x, text } of ticks(x0, x1, Math.max(4, Math.floor(size / 110)), whole)) {
      picture.append(svg("path", { class: "tick", d: `M${px(x)} ${height - bottom}v4` }),
        svg("text", { x: px(x), y: height - bottom + 17, "text-anchor": "middle" }, text));
    }
    picture.append(svg("path", { class: "axis", d: `M${left} ${height - bottom}H${size - right}` }),
      svg("text", { class: "label", x: (left + size - right) / 2, y: height - 6, "text-anchor": "middle" }, axis.label),
      svg("text", { class: "label", x: -(height - bottom + top) / 2, y: 12, transform: "rotate(-90)", "text-anchor": "middle" }, value.label));
    for (const one of visible) {
      const group = svg("g", { class: "series", "data-curve": one.label, style: `--c:var(--c${one.look.colour})` });
      const banded = one.points.filter((point) => point.half !== null);
      if (banded.length > 1) {
        const edge = (sign) => banded.map(({ x, y, half }) => `${px(x)} ${py(y + sign * half)}`);
        group.append(svg("path", { class: "band", d: `M${edge(1).join("L")}L${edge(-1).reverse().join("L")}Z` }));
      }
      group.append(svg("path", { class: "line", "stroke-dasharray": DASHES[one.look.dash],
        d: `M${one.points.map(({ x, y }) => `${px(x)} ${py(y)}`).join("L")}` }));
      const each = Math.max(1, Math.round(one.points.length / (size / 26))); // markers must not touch
      one.points.forEach(({ x, y }, i) => {
        if ((i + one.i) % each === 0) {
          group.append(svg("path", { class: "marker", d: MARKERS[one.look.colour], transform: `translate(${px(x)} ${py(y)})` }));
        }
      });
      picture.append(group);
    }
    for (const mark of drawnMarks) {
      picture.append(mark.ring
        ? svg("circle", { class: "ring", cx: px(mark.x), cy: py(mark.y), r: 9 })
        : svg("path", { class: "star", d: MARKERS[mark.marker], transform: `translate(${px(mark.x)} ${py(mark.y)}) scale(1.5)` }));
    }
    const guide = svg("g", { class: "guide" });
    picture.append(guide);
    plot.replaceChildren(picture);
    place = { visible, px, py, guide, top, floor: height - bottom, picture };
    read();
  }

  // Shows the values at the x nearest to `at`; a line without a point near it shows none.
  function read() {
    buttons.forEach((button) => { button.querySelector(".value").textContent = ""; });
    reading.textContent = "Hover over or touch the chart to read values.";
    if (!place) return;
    place.guide.replaceChildren();
    if (at === null) return;
    const { visible, px, py, guide, top, floor } = place;
    reading.textContent = `${axis.label}: ${short(at)}`;
    guide.append(svg("path", { d: `M${px(at)} ${top}V${floor}` }));
    for (const one of visible) {
      const nearest = closest(one.points, (point) => Math.abs(point.x - at));
      const apart = (px(one.points.at(-1).x) - px(one.points[0].x)) / Math.max(1, one.points.length - 1);
      const output = buttons[one.i].querySelector(".value");
      if (Math.abs(px(nearest.x) - px(at)) > Math.max(8, apart / 2)) { output.textContent = NONE; continue; }
      output.textContent = fixed(nearest.y, value.digits) + (nearest.half === null ? "" : ` ± ${fixed(nearest.half, value.digits)}`);
      guide.append(svg("circle", { cx: px(nearest.x), cy: py(nearest.y), r: 5, style: `--c:var(--c${one.look.colour})` }));
    }
  }

  const closest = (list, distance) => list.reduce((best, one) => (distance(one) < distance(best) ? one : best));
  const places = () => [...new Set(place.visible.flatMap((one) => one.points.map((point) => point.x)))].sort((a, b) => a - b);

  function follow(event) {
    if (!place) return;
    const box = place.picture.getBoundingClientRect();
    const x = (event.clientX - box.left) * size / box.width;
    at = closest(places(), (one) => Math.abs(place.px(one) - x));
    read();
  }
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") { at = null; read(); }
  });
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !place) return;
    event.preventDefault();
    const all = places(), now = all.indexOf(at);
    at = all[now < 0 ? (step > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, now + step))];
    read();
  });

  if (key) host.append(html("figcaption", {}, key));
  host.append(tableOf(`${title}: values`, ["curve", ...offered.map((one) => one.label), ...values.map((one) => one.label)],
    () => series.flatMap((one) => one.x[offered[0].key].map((_, i) => [one.label,
      ...offered.map(({ key }) => (one.x[key].length ? short(one.x[key][i]) : NONE)),
      ...values.map(({ key, digits }) => {
        const half = one.half?.[key]?.[i] ?? null;
        return fixed(one.y[key][i], digits) + (half === null ? "" : ` ± ${fixed(half, digits)}`);
      })]))));
  drawn(plot, (width) => { size = width; redraw(); });
}
