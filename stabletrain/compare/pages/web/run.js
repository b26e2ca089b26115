// The page of one run, put together: its own curves, a picture each; none where it measured nothing.
"use strict";
const place = document.getElementById("pictures");
const pictures = place && new Pictures(place, PAGE.panels);
if (pictures) {
  pictures.show([{ ...PAGE.run, alone: true, style: Colors.style(0, 1, false) }]);
  document.getElementById("smooth").addEventListener("input", (event) => pictures.smooth(Number(event.target.value)));
}
