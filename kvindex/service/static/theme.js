// Runs before the page is drawn, so that it does not flash in the other colours.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("kvindex-theme");
  } catch {
    // Storage may be forbidden; then the system's choice holds.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
