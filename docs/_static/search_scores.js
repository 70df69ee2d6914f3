// The search of Sphinx by its usual scores, but for queries of four words and more: these are words of a message, most
// likely, so that the pages of messages come first.
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const isMessage = query.trim().split(/\s+/).length > 3;
    return isMessage ? score + ({ errors: 200, messages: 100 }[docname] || 0) : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
