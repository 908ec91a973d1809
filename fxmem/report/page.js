"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const shown = (n) => {
    let power = 0;
    while (Math.abs(n) >= 1024 && power < units.length - 1) { n /= 1024; power += 1; }
    return `${power ? n.toFixed(2) : n} ${units[power]}`;
  };
  const text = (chart, bin) => {
    const [name, module, line, bytes, parts] = chart.ops[chart.at[bin]];
    const kinds = parts.map((n, kind) => (n ? `\n${data.kinds[kind]}: ${shown(n)}` : "")).join("");
    return [name, data.words[module], data.words[line]].filter(Boolean).join("\n") + `\n${shown(bytes)} alive${kinds}`;
  };
  document.querySelectorAll("[data-chart]").forEach((box) => {
    const chart = data.charts[Number(box.dataset.chart)];
    const cursor = box.appendChild(Object.assign(document.createElement("div"), { className: "cursor" }));
    const hide = () => { tip.style.display = cursor.style.display = "none"; };
    box.addEventListener("pointermove", (event) => {
      const area = box.getBoundingClientRect();
      const share = (event.clientX - area.left) / area.width;
      const bin = Math.floor(share * data.bins);
      if (bin < 0 || bin >= chart.at.length || chart.at[bin] < 0) { hide(); return; }
      tip.textContent = text(chart, bin);
      tip.style.display = cursor.style.display = "block";
      cursor.style.left = `${share * 100}%`;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
    });
    box.addEventListener("pointerleave", hide);
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
})();
