// Sets the chosen theme before the first paint, so that no other one flashes.
try {
  const chosen = localStorage.getItem("nesa-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be forbidden: the system's theme is used.
}
