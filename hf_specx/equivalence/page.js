(() => {
  "use strict";
  // tables that are wider than the page say so; without scripts all do
  for (const box of document.querySelectorAll(".scroll")) {
    const say = () => {
      const cut = box.scrollWidth > box.clientWidth;
      box.previousElementSibling.hidden = !cut;
      box.classList.toggle("cut", cut && box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    };
    new ResizeObserver(say).observe(box);
    box.addEventListener("scroll", say);
  }

  const panel = document.getElementById("panel");
  if (!panel) return;
  const tokens = [...document.querySelectorAll("#tokens .token")];
  const hint = document.querySelector(".hint");
  const rejected = panel.querySelector("[data-part=rejected]");
  let current = -1;
  document.getElementById("without-scripts").remove();

  // one stop of the Tab key for all tokens; arrows go from one to the next
  tokens.forEach((token, place) => {
    token.tabIndex = place ? -1 : 0;
    token.removeAttribute("title");
  });

  function mark(place) {
    tokens[current]?.removeAttribute("aria-current");
    current = place;
    tokens[current]?.setAttribute("aria-current", "true");
  }

  function show(place) {
    const data = tokens[place].dataset;
    for (const field of panel.querySelectorAll("[data-field]")) {
      field.textContent = data[field.dataset.field] ?? "";
    }
    panel.querySelector("[data-field=origin]").className = `token ${data.origin}`;
    rejected.hidden = !("rejected" in data);
    mark(place);
    panel.hidden = false;
    hint.hidden = true;
  }

  function close() {
    // first, since it chooses the token
    if (panel.contains(document.activeElement)) tokens[current]?.focus({ preventScroll: true });
    mark(-1);
    panel.hidden = true;
    hint.hidden = false;
  }

  // where the panel sticks to the end of the window it may lie over the token
  function uncover(token) {
    const cover = panel.parentElement.getBoundingClientRect();
    const at = token.getBoundingClientRect();
    if (at.bottom > cover.top && at.top < cover.bottom && at.left < cover.right && at.right > cover.left) {
      window.scrollBy(0, at.bottom - cover.top + 8);
    }
  }

  function choose(place) {
    show(place);
    tokens.forEach((token, each) => { token.tabIndex = each === place ? 0 : -1; });
    uncover(tokens[place]);
  }

  function go(place) {
    tokens[Math.min(Math.max(place, 0), tokens.length - 1)]?.focus();
  }

  const placeOf = (event) => tokens.indexOf(event.target.closest("#tokens .token"));
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const text = document.getElementById("tokens");

  text.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse" && placeOf(event) >= 0) show(placeOf(event));
  });
  text.addEventListener("focusin", (event) => {
    if (placeOf(event) >= 0) choose(placeOf(event));
  });
  text.addEventListener("click", (event) => {
    const place = placeOf(event);
    if (place < 0) return;
    tokens[place].focus({ preventScroll: true });
    choose(place);
  });
  text.addEventListener("keydown", (event) => {
    const place = placeOf(event);
    if (place < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in steps) go(place + steps[event.key]);
    else if (event.key === "Home") go(0);
    else if (event.key === "End") go(tokens.length - 1);
    else if (event.key === "Enter" || event.key === " ") choose(place);
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  panel.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if ("close" in button.dataset) {
      close();
      return;
    }
    choose(Math.min(Math.max(current + Number(button.dataset.step), 0), tokens.length - 1));
    tokens[current].scrollIntoView({ block: "nearest" });
    uncover(tokens[current]);
  });
})();
