// Light or dark: as the system says, until the reader says otherwise.

const CHOICES = ["auto", "light", "dark"];
const KEPT = "workbench-report-theme";

export function followTheme(button, redraw) {
  const choose = choice => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    button.textContent = `Theme: ${choice}`;
    redraw();
  };
  let choice = kept();
  choose(choice);
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    keep(choice);
    choose(choice);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

// A page that is opened from a file may not be allowed to keep anything.
function kept() {
  try {
    return CHOICES.find(choice => choice === localStorage.getItem(KEPT)) ?? "auto";
  } catch {
    return "auto";
  }
}

function keep(choice) {
  try {
    localStorage.setItem(KEPT, choice);
  } catch {
    return;
  }
}
