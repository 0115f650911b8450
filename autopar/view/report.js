"use strict";
const zoomed = document.querySelector(".zoomed");
const view = zoomed.parentElement;
let zoom = 1;

function setZoom(to, at = view.clientWidth / 2) {
  const next = Math.min(Math.max(to, 1), 400);
  const left = (view.scrollLeft + at) * (next / zoom) - at;
  zoom = next;
  zoomed.style.width = `${100 * zoom}%`;
  view.scrollLeft = left;
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
