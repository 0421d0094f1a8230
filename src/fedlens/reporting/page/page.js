// Tabs, the setting, choosers, details of numbers, copying, filtering.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  function show(tab) {
    for (const other of tabs) {
      const on = other === tab;
      other.setAttribute("aria-selected", on);
      other.tabIndex = on ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).classList.toggle("away", !on);
    }
    const everywhere = ["audit", "runs"].includes(name(tab)); // these cover all settings
    document.querySelector(".switch")?.classList.toggle("away", everywhere);
    tab.scrollIntoView({ block: "nearest", inline: "center" });
  }
  const name = (tab) => tab.id.replace("tab-", "");

  // The address names a tab, or an element within one.
  function follow() {
    const wanted = location.hash.slice(1);
    const inside = wanted && document.getElementById(wanted);
    const panel = inside && inside.closest("[role=tabpanel]");
    show(tabs.find((tab) => name(tab) === wanted || tab.getAttribute("aria-controls") === panel?.id) ?? tabs[0]);
    if (!panel) return;
    const part = inside.closest("[data-setting]");
    if (setting && part) { setting.value = part.dataset.setting; choose(); }
    inside.scrollIntoView();
  }

  function open(tab) {
    const bar = document.querySelector(".bar"), top = bar.previousElementSibling.offsetHeight;
    if (window.scrollY > top) window.scrollTo(0, top);
    show(tab);
    location.hash = name(tab);
  }
  for (const tab of tabs) {
    tab.addEventListener("click", () => open(tab));
    tab.addEventListener("keydown", (event) => {
      const now = tabs.indexOf(tab), last = tabs.length - 1;
      const next = { ArrowLeft: now ? now - 1 : last, ArrowRight: now < last ? now + 1 : 0, Home: 0, End: last }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      open(tabs[next]);
      tabs[next].focus();
    });
  }
  window.addEventListener("hashchange", follow);

  const setting = document.getElementById("setting");
  const choose = () => all("[data-setting]").forEach((part) =>
    part.classList.toggle("away", part.dataset.setting !== setting.value));
  if (setting) { setting.addEventListener("change", choose); choose(); }

  for (const select of all("[data-choose]")) {
    const parts = [...document.querySelector(`[data-choices="${select.dataset.choose}"]`).children];
    const pick = () => parts.forEach((part, i) =>
      part.classList.toggle("away", select.value !== "all" && Number(select.value) !== i));
    select.addEventListener("change", pick);
    pick();
  }

  for (const figure of all("[data-draw]")) {
    const { draw, chapter, index, part } = figure.dataset;
    DRAWINGS[draw](figure, data[chapter], index, part);
  }

  const grids = new Map(data.flatMap((chapter) => [chapter.headline, ...chapter.grids]).filter(Boolean).map((grid) => [grid.name, grid]));
  function showDetails(button) {
    const [row, column] = button.dataset.cell.split(" ");
    const grid = grids.get(button.closest("[data-grid]").dataset.grid), cell = grid.cells[row][column];
    const details = [
      cell.lr === null ? "" : `learning rate ${short(cell.lr)}`,
      cell.candidates > 1 ? `chosen among ${cell.candidates} on validation` : "",
      cell.validation === null ? "" : `validation ${fixed(cell.validation)}`,
      cell.deviation === null ? "1 seed, no interval" : `standard deviation ${fixed(cell.deviation)}`,
      cell.untrained ? `best before training in ${cell.untrained} of ${counted(cell.seeds.length, "seed")}` : "",
      cell.megabytes === null ? "" : `${short(cell.megabytes)} MB sent`,
    ].filter(Boolean).join(" · ");
    all(`[data-about="${grid.name}"]`).forEach((about) => about.replaceChildren(
      html("b", {}, `${grid.rows[row]}, ${grid.columns[column]}: ${within(cell.mean, cell.half)}`),
      html("span", {}, cell.method), html("span", {}, details), ...cell.runs.map((run) => html("code", {}, run))));
    all(".number.selected", button.closest("table")).forEach((other) => other.classList.remove("selected"));
    button.classList.add("selected");
  }
  for (const button of all(".number")) {
    for (const type of ["pointerenter", "focus", "click"]) button.addEventListener(type, () => showDetails(button));
  }

  for (const button of all(".copy")) {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "copied";
      } catch { // some browsers forbid it: select the text instead
        getSelection().selectAllChildren(text);
        button.textContent = "selected";
      }
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }

  // What is wider than its place fades where it goes on.
  function hint(node) {
    const rest = node.scrollWidth - node.clientWidth;
    node.classList.toggle("more-left", node.scrollLeft > 4);
    node.classList.toggle("more-right", rest - node.scrollLeft > 4);
  }
  const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => hint(target)));
  for (const node of all("[role=tablist], .scroll")) {
    node.addEventListener("scroll", () => hint(node), { passive: true });
    resized.observe(node);
  }

  const filter = document.getElementById("filter"), made = all(".made");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = made.filter((run) => {
      const text = run.textContent.toLowerCase(), keep = words.every((word) => text.includes(word));
      run.classList.toggle("away", !keep);
      return keep;
    });
    document.getElementById("filtered").textContent = `${kept.length} of ${counted(made.length, "run")}`;
  });

  follow();
})();
