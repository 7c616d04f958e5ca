// Start everything, the first screen before the table.

function startLinks() {
  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("button.link") : null;
    if (!button) return;
    const { row, layer, operand, gemm } = button.dataset;
    const found = row !== undefined ? Number(row) : findRow(layer, operand, gemm);
    if (found !== null) goToRow(found);
  });
}

/** Mark the section that is on the screen in the bar. */
function startBar() {
  const links = new Map([...document.querySelectorAll("header.bar nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting || !links.has(entry.target.id)) continue;
        for (const link of links.values()) link.removeAttribute("aria-current");
        links.get(entry.target.id).setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  document.querySelectorAll("main > section").forEach((section) => seen.observe(section));
}

startTheme();
startTips();
startCharts();
startMap();
startExperts();
startCurves();
startImpact();
startDetail();
startLinks();
startBar();
requestAnimationFrame(() => setTimeout(startTable, 0));
