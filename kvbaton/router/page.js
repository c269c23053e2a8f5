"use strict";
(() => {
  const RETRY_MS = 3000;
  const page = document.getElementById("status");
  const link = document.getElementById("link");
  let source = null;

  const say = (text, state) => {
    if (link.textContent !== text) link.textContent = text;
    link.className = state;
  };

  // Only what changed is touched, so that a selection and what is read aloud stay.
  const patch = (old, now) => {
    if (old.isEqualNode(now)) return;
    const alike = old.nodeName === now.nodeName && old.nodeType === Node.ELEMENT_NODE;
    if (!alike || old.childNodes.length !== now.childNodes.length) {
      old.replaceWith(now);
      return;
    }
    for (const { name } of [...old.attributes]) if (!now.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of now.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    const news = [...now.childNodes];
    [...old.childNodes].forEach((child, index) => patch(child, news[index]));
  };

  const connect = () => {
    const mine = (source = new EventSource("events"));
    mine.onmessage = (event) => {
      const now = document.createElement("template");
      now.innerHTML = event.data;
      const news = [...now.content.childNodes];
      if (page.childNodes.length === news.length) {
        [...page.childNodes].forEach((child, index) => patch(child, news[index]));
      } else {
        page.replaceChildren(...news);
      }
      say("live", "live");
    };
    mine.onerror = () => {
      say("no word from the router; trying again", "lost");
      mine.close();
      setTimeout(() => { if (source === mine) connect(); }, RETRY_MS);
    };
  };

  // A page that nobody sees costs nothing, and leaves its connection to others.
  const follow = () => {
    if (source) source.close();
    source = null;
    if (!document.hidden) connect();
  };
  document.addEventListener("visibilitychange", follow);
  follow();
})();
