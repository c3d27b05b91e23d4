// What both pages share. Everything that is shown is set as text: nothing of the data becomes markup.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

/** An element with properties and children; strings become text. */
function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** The same for drawings, whose properties are all attributes. */
function draw(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

/** A path's last part: "model.py:12" of "/a/b/model.py:12". */
function shortLine(line) {
  return line ? line.replaceAll("\\", "/").split("/").pop() : "";
}

/** Call it once a frame at most. */
function oncePerFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}
