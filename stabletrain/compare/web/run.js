// The page of one run, put together: its own curves, a picture each.
"use strict";
const pictures = new Pictures(document.getElementById("pictures"), PAGE.panels);
pictures.show([{ ...PAGE.run, alone: true, style: Colors.style(0, 1, false) }]);
document.getElementById("smooth").addEventListener("input", (event) => pictures.smooth(Number(event.target.value)));
