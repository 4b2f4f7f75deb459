// The theme, and the colours of it for what is drawn on a canvas.

const KEY = "nesa-theme";
const CHOICES = ["auto", "light", "dark"];
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

let known = new Map();

// The value of a CSS variable as a canvas understands it.
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
      // It lasts as long as this page, then.
    }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  button.textContent = `Theme: ${root.dataset.theme ?? "auto"}`;
}
