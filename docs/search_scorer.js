// Rank pages for users above pages for maintainers in search results. The other numbers are Sphinx's defaults.
const MAINTAINERS = /^(decisions|architecture|changelog|contributing)/;

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename]) =>
    MAINTAINERS.test(docname) ? score - 20 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
