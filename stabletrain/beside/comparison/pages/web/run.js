// Sets up the page of one run: a chart per panel, and none if the run has logged no metric.
"use strict";
const place = document.getElementById("pictures");
const pictures = place && new Pictures(place, PAGE.panels);
if (pictures) {
  pictures.show([{ ...PAGE.run, alone: true, style: Colors.style(0, 1, false) }]);
  document.getElementById("smooth").addEventListener("input", (event) => pictures.smooth(Number(event.target.value)));
}
