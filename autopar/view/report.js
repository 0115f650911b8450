"use strict";
const zoomed = document.querySelector(".zoomed");
const view = zoomed.parentElement;
const axis = zoomed.querySelector(".axis");
const whole = axis.innerHTML;
let zoom = 1;

function setZoom(to, at = view.clientWidth / 2) {
  const next = Math.min(Math.max(to, 1), 400);
  const left = (view.scrollLeft + at) * (next / zoom) - at;
  zoom = next;
  zoomed.style.width = `${100 * zoom}%`;
  markTimes();
  view.scrollLeft = left;
}

function markTimes() { // round times, of which a few are in view
  axis.classList.toggle("close", zoom > 1);
  axis.innerHTML = whole;
  if (zoom === 1) return;
  const total = 1000 * Number(zoomed.dataset.seconds);
  const least = total / zoom / (view.clientWidth / 100);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= least);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const marks = [axis.firstElementChild];
  for (let i = 1; i * step < 0.995 * total; i += 1) {
    const mark = document.createElement("span");
    mark.textContent = `${(i * step).toFixed(digits)} ms`;
    mark.style.left = `${100 * i * step / total}%`;
    marks.push(mark);
  }
  axis.replaceChildren(...marks);
}

document.querySelectorAll("[data-zoom]").forEach((button) => {
  button.addEventListener("click", () => setZoom(Number(button.dataset.zoom) * zoom));
});
view.addEventListener("wheel", (event) => {
  if (!event.ctrlKey) return; // an ordinary wheel scrolls the page
  event.preventDefault();
  setZoom(zoom * Math.exp(-event.deltaY / 200), event.clientX - view.getBoundingClientRect().left);
}, { passive: false });

let dragged = null;
view.addEventListener("mousedown", (event) => { dragged = { x: event.clientX, left: view.scrollLeft }; });
window.addEventListener("mouseup", () => { dragged = null; });
window.addEventListener("mousemove", (event) => {
  if (dragged) view.scrollLeft = dragged.left - (event.clientX - dragged.x);
});
