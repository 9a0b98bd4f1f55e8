// Draws the report's curves with uPlot: values below the cursor, zoom, log axis, smoothing; light, dark and on paper.
"use strict";
(() => {
  const COLOURS = ["#3987e5", "#e0662f", "#35a05a", "#a864c2", "#b8932f", "#7d868f", "#2fa9bd", "#d4679b"];
  const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
  const BORDERS = ["solid", "dashed", "dotted", "dashed"]; // of a curve's sign in the legend
  const POINTS = 20; // curves with fewer points show them
  const slider = document.getElementById("smoothing");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const number = (value, digits = 4) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e4) return Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: digits }).format(value);
    if (!size || size >= 1e-3) return String(+value.toPrecision(digits));
    const [factor, power] = value.toExponential(digits - 1).split("e-");
    return `${+factor}e−${power}`;
  };
  // The labels of an axis, with as many digits as neighbours need to differ.
  function ticks(plot, splits, axis, space, step) {
    const most = Math.max(...splits.map((split) => Math.abs(split ?? 0)));
    const digits = step && most ? Math.min(12, Math.max(3, Math.ceil(Math.log10(most / step)) + 2)) : 3;
    return splits.map((split) => (split === null ? "" : number(split, digits)));
  }
  // The range of an axis without limits; a flat curve lies in its middle, one of zeros at its bottom.
  function range(plot, low, high) {
    if (low === null || low === undefined) return [0, 1];
    if (low === high) return low ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : [0, 1];
    return uPlot.rangeNum(low, high, 0.1, true);
  }
  // One step, such as the last of an episode, lies in the middle.
  const steps = (plot, low, high) => {
    const [first, second] = plot.data[0];
    return first !== undefined && second === undefined ? [first - 1, first + 1] : [low, high];
  };
  // What the legend says: the value below the cursor, else the last one.
  const said = (form) => (plot, value, series, index) => {
    if (index !== null && index !== undefined) return form(value);
    const last = plot.data[series].findLast((one) => one !== null && one !== undefined);
    return form(last);
  };

  // The mean of a point and those before it, with weights that fall by `weight` per point.
  function smooth(values, weight) {
    let sum = 0, total = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  class Curves {
    constructor(figure) {
      this.place = figure.querySelector(".plot");
      this.about = JSON.parse(figure.querySelector("script").textContent);
      this.box = figure.querySelector(".log");
      const values = this.about.lines.flatMap((line) => line.y).filter((value) => value !== null);
      this.box.checked = this.about.log;
      this.box.disabled = !values.length || values.some((value) => value <= 0);
      this.box.addEventListener("change", () => this.draw());
      new ResizeObserver(() => this.plot && this.place.clientWidth !== this.width && this.draw()).observe(this.place);
      this.draw();
    }

    draw() {
      const { about, place } = this;
      const shown = this.plot && this.plot.series.map((one) => one.show);
      const zoom = this.plot && this.zoomed ? [this.plot.scales.x.min, this.plot.scales.x.max] : null;
      if (this.plot) this.plot.destroy();
      const weight = slider && about.xLabel === "step" ? +slider.value : 0;
      const style = getComputedStyle(document.documentElement);
      const [soft, faint] = ["--soft", "--faint"].map((name) => style.getPropertyValue(name).trim());
      const tables = [], series = [{ label: about.xLabel, value: said((x) => (x === undefined ? "–" : x.toLocaleString("en"))) }];
      const bands = [], hidden = [], borders = ["solid"];
      const add = (x, y, options, isHidden = false) => {
        tables.push([x, y]);
        series.push({ value: said((y) => number(y)), spanGaps: false, ...options });
        borders.push(BORDERS[Math.max(0, DASHES.indexOf(options.dash))]);
        if (isHidden) hidden.push(series.length - 1);
      };
      about.lines.forEach((line) => {
        const stroke = COLOURS[line.colour % COLOURS.length], dash = DASHES[line.dash % DASHES.length];
        const points = { show: line.x.length < POINTS, size: 5 };
        if (line.band) {
          line.band.forEach((end) => add(line.x, end, { label: "", points: { show: false } }, true));
          bands.push({ series: [series.length - 1, series.length - 2], fill: stroke + "2b" });
        }
        if (weight) add(line.x, line.y, { label: "", stroke: stroke + "44", width: 1, points: { show: false } }, true);
        add(line.x, weight ? smooth(line.y, weight) : line.y, { label: line.label, stroke, dash, width: 1.8, points });
      });
      const data = uPlot.join(tables.map(([x, y]) => [x, y]));
      const axis = { font: "11px system-ui, sans-serif", values: ticks, stroke: soft, grid: { stroke: faint, width: 1 }, ticks: { stroke: faint, width: 1 } };
      const y = this.box.checked ? { distr: 3 } : about.limits ? { range: [about.limits[0] - 0.02, about.limits[1] + 0.02] } : { range };
      const width = (plot, texts) =>
        Math.max(30, 18 + 6.5 * Math.max(0, ...(texts || []).map((text) => (text || "").length)));
      this.width = place.clientWidth;
      this.zoomed = Boolean(zoom);
      this.plot = new uPlot({
        width: this.width, height: 230, series, bands,
        scales: { x: { time: false, range: steps }, y },
        legend: { markers: { dash: (plot, index) => borders[index] } },
        axes: [
          { ...axis, space: 60, size: 34, incrs: [1, 2, 5].flatMap((n) => // whole steps
            Array.from({ length: 10 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b) },
          { ...axis, size: width },
        ],
        cursor: { sync: about.xLabel === "step" ? { key: "steps" } : undefined, y: false },
        hooks: { setSelect: [() => { this.zoomed = true; }] },
      }, data, place);
      this.plot.over.addEventListener("dblclick", () => { this.zoomed = false; });
      hidden.forEach((index) => place.querySelectorAll(".u-series")[index].classList.add("hidden"));
      if (shown && shown.length === series.length) {
        shown.forEach((show, index) => index && !show && this.plot.setSeries(index, { show: false }));
      }
      if (zoom) this.plot.setScale("x", { min: zoom[0], max: zoom[1] });
    }
  }

  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Curves(figure));
  const redraw = () => charts.forEach((chart) => chart.draw());
  if (slider) {
    slider.addEventListener("input", () => { slider.nextElementSibling.value = slider.value; redraw(); });
  }
  dark.addEventListener("change", redraw);
  // Paper is white, and its two columns are narrow.
  const onPaper = (isPaper) => {
    document.documentElement.toggleAttribute("data-print", isPaper);
    charts.forEach((chart) => { chart.place.style.width = isPaper ? "320px" : ""; chart.draw(); });
  };
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));
})();
