(() => {
  "use strict";
  const panel = document.getElementById("panel");
  if (!panel) return;
  const tokens = [...document.querySelectorAll("#tokens .token")];
  let current = 0;

  function show(place) {
    if (place < 0) return;
    tokens[current].tabIndex = -1; // one stop of the Tab key for all tokens
    tokens[current].removeAttribute("aria-current");
    current = place;
    tokens[current].tabIndex = 0;
    tokens[current].setAttribute("aria-current", "true");
    panel.textContent = tokens[current].dataset.told;
    panel.hidden = false;
  }

  tokens.forEach((token, place) => {
    token.dataset.told = token.title;
    token.setAttribute("aria-label", token.title);
    token.removeAttribute("title");
    token.tabIndex = place ? -1 : 0;
  });
  const text = document.getElementById("tokens");
  const placeOf = (event) => tokens.indexOf(event.target.closest("#tokens .token"));
  for (const kind of ["pointerover", "focusin", "click"]) text.addEventListener(kind, (event) => show(placeOf(event)));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") panel.hidden = true;
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -tokens.length, End: tokens.length };
    if (!(event.key in steps) || placeOf(event) < 0) return;
    tokens[Math.min(Math.max(current + steps[event.key], 0), tokens.length - 1)].focus();
    event.preventDefault();
  });
})();
