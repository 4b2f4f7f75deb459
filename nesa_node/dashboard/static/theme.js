// The theme, and its colours for canvases.

const KEY = "nesa-theme";
const CHOICES = ["auto", "light", "dark"];
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

let known = new Map();

// Value of a CSS variable in a form that a canvas accepts.
export function colour(name) {
  if (!known.has(name)) {
    probe.style.color = `var(--${name})`;
    known.set(name, getComputedStyle(probe).color);
  }
  return known.get(name);
}

export function watchTheme(button, changed) {
  const root = document.documentElement;
  const show = () => {
    button.textContent = `Theme: ${root.dataset.theme ?? "auto"}`;
    known = new Map();
    changed();
  };
  button.addEventListener("click", () => {
    const now = CHOICES.indexOf(root.dataset.theme ?? "auto");
    const next = CHOICES[(now + 1) % CHOICES.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // Without storage the choice lasts until the page is closed.
    }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  button.textContent = `Theme: ${root.dataset.theme ?? "auto"}`;
}
