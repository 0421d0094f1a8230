// The figures of the page, by kind, from the data in it.
const DRAWINGS = {
  curves(host, chapter, index) {
    const set = chapter.curves[index], grid = tableBehind(chapter, set.name);
    const { ordered, groups } = placed(set.curves, grid);
    const mixed = set.unit === "round" && set.curves.some((curve) => !curve.megabytes.length);
    lineChart(host, {
      title: set.title,
      axes: [
        { key: "unit", label: mixed ? "rounds (central: epochs)" : `${set.unit}s` },
        { key: "steps", label: "local steps" },
        { key: "megabytes", label: "megabytes sent" },
      ],
      values: [{ key: "accuracy", label: "validation accuracy, %", digits: 2 }],
      groups,
      series: ordered.map(({ item, look }) => ({
        label: item.label, look, note: item.runs.length === 1 ? "1 seed" : "",
        x: { unit: item.unit, steps: item.steps, megabytes: item.megabytes },
        y: { accuracy: item.mean }, half: { accuracy: item.half },
      })),
    });
  },

  observed(host, chapter, index) {
    const set = chapter.curves[index];
    const { ordered, groups } = placed(set.observations, tableBehind(chapter, set.name));
    lineChart(host, {
      title: `${set.title}: clients over rounds`,
      axes: [{ key: "round", label: "rounds" }],
      values: [
        { key: "drift", label: "drift from the clients' mean", digits: 3 },
        { key: "cosine", label: "cosine of updates", digits: 3 },
        { key: "sign_agreement", label: "sign agreement", digits: 3 },
      ],
      groups,
      series: ordered.map(({ item, look }) => ({
        label: item.label, look, note: item.runs.length === 1 ? "1 seed" : "", x: { round: item.round }, y: item,
      })),
    });
  },

  alpha(host, chapter, index, part) {
    const curve = chapter.alphas[index], chosen = curve.alphas.indexOf(curve.chosen);
    const label = { accuracy: "validation accuracy, %", loss: "validation loss" }[part];
    lineChart(host, {
      title: `${part} over α`,
      axes: [{ key: "alpha", label: "α" }],
      values: [{ key: part, label, digits: part === "loss" ? 4 : 2 }],
      series: [{ label: `validation ${part}`, look: look(0, 0), x: { alpha: curve.alphas }, y: curve }],
      marks: [
        { value: part, x: curve.chosen, y: curve[part][chosen], ring: true },
        { value: "accuracy", x: curve.chosen, y: curve.test, marker: 6 },
        { value: "accuracy", x: 1, y: curve.as_trained, marker: 3 },
      ],
      key: `○ the α chosen on validation${part === "accuracy" ? " · ★ its test accuracy · ◆ test accuracy as trained" : ""}`,
    });
  },

  finding(host, chapter, index) {
    const { kind, label, record } = chapter.findings[index];
    const rows = record.candidates, percent = (value) => (value === null ? null : 100 * value);
    if (kind === "clients") {
      const named = [["validation", rows[0], rows[1]], ["test", record.as_trained.test, record.test]];
      const labels = { target: "target", control: "control", top1: "all classes" };
      host.append(html("div", { class: "scroll" }, html("table", {},
        html("caption", { class: "unseen" }, "Accuracy before and after the edit"),
        html("thead", {}, html("tr", {}, ...["", "as trained", "edited"].map((head, i) => html("th", { scope: "col", class: i ? "right" : null }, head)))),
        html("tbody", {}, ...named.flatMap(([split, before, after]) => Object.keys(labels).map((key) => html("tr", {},
          html("th", { scope: "row" }, `${labels[key]}, ${split}`),
          ...[before, after].map((row) => html("td", { class: "right" }, fixed(percent(key === "top1" && row.validation ? row.validation.top1 : row[key]), 2))))))))));
      return;
    }
    const scale = kind === "compose" ? "alpha" : "scale", symbol = kind === "compose" ? "α" : "λ";
    const lines = kind === "forget"
      ? ["control", "target"].map((key) => [key, rows, (row) => percent(row[key])])
      : [...new Set(rows.map((row) => row.method ?? "composed"))].map((method) =>
        [method.replaceAll("_", " "), rows.filter((row) => (row.method ?? "composed") === method), (row) => percent(row.validation.top1)]);
    const chosen = rows[record.chosen];
    lineChart(host, {
      title: `${kind}: ${label}`,
      axes: [{ key: "scale", label: symbol }],
      values: [{ key: "accuracy", label: "validation accuracy, %", digits: 2 }],
      series: lines.map(([name, own, read], i) => ({
        label: name, look: look(i, i), x: { scale: own.map((row) => row[scale]) }, y: { accuracy: own.map(read) },
      })),
      marks: [{ value: "accuracy", x: chosen[scale], y: percent(kind === "forget" ? chosen.control : chosen.validation.top1), ring: true }],
      key: `○ the ${symbol} chosen on validation`,
    });
  },

  dots(host, chapter, index) {
    dotChart(host, index === "headline" ? chapter.headline : chapter.grids[index]);
  },

  // One pixel per client and class; opacity is the count, which works on light and dark.
  partition(host, chapter, index) {
    const { label, histogram } = chapter.partitions[index];
    const most = Math.max(...histogram.map((row) => Math.max(...row))), classes = histogram[0].length;
    const canvas = html("canvas", { width: classes, height: histogram.length, role: "img",
      "aria-label": `${label}: images of ${classes} classes at ${counted(histogram.length, "client")}; at most ${most}` });
    const context = canvas.getContext("2d"), image = context.createImageData(classes, histogram.length);
    histogram.flat().forEach((count, i) => {
      const [red, green, blue] = [0x3a, 0x93, 0xcf];
      image.data.set([red, green, blue, Math.round(255 * Math.sqrt(count / most))], 4 * i);
    });
    context.putImageData(image, 0, 0);
    const hint = `rows: clients, columns: classes; at most ${counted(most, "image")}`;
    const reading = html("figcaption", {}, hint);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect(), at = (part, size, count) => Math.min(count - 1, Math.max(0, Math.floor(part / size * count)));
      const client = at(event.clientY - box.top, box.height, histogram.length);
      const column = at(event.clientX - box.left, box.width, classes);
      reading.textContent = `client ${client}, class ${column}: ${counted(histogram[client][column], "image")}`;
    });
    canvas.addEventListener("pointerleave", () => { reading.textContent = hint; });
    host.append(canvas, reading);
  },
};

const tableBehind = (chapter, name) => [chapter.headline, ...chapter.grids].find((grid) => grid?.name === name);

// Curves in their table's order: a colour for each row, a dash for each column.
function placed(items, grid) {
  const places = new Map(grid.rows.flatMap((row, r) => grid.columns.map((column, c) => {
    const words = [grid.rows.length > 1 ? row : "", grid.columns.length > 1 ? column : ""];
    return [words.filter(Boolean).join(", ") || row, { row, column, r, c }];
  })));
  const placements = items.map((item) => ({ item, ...places.get(item.label) })).sort((a, b) => a.r - b.r || a.c - b.c);
  const present = (key) => [...new Set(placements.map((one) => one[key]))];
  const rows = present("row").filter((row) => row !== "dense"), columns = present("column");
  const colourOf = (row) => (row === "dense" ? INK : [0, 1, 2, 3, 4, 6][rows.indexOf(row) % 6]);
  const both = present("row").length > 1 && columns.length > 1;
  const ordered = placements.map((one, i) => ({
    item: one.item,
    look: both ? look(colourOf(one.row), columns.indexOf(one.column) + Math.floor(rows.indexOf(one.row) / 6))
      : look(present("row").length > 1 ? colourOf(one.row) : i, i),
  }));
  const groups = both ? columns.map((column) => ({
    label: column, members: placements.flatMap((one, i) => (one.column === column ? [i] : [])),
  })) : [];
  return { ordered, groups };
}
