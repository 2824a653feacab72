// Rank the guide above the reference of classes and the results, and these above pages for maintainers. The
// other numbers are Sphinx's defaults.
const MAINTAINERS = /^(decisions|architecture|changelog|contributing)/;
const REFERENCE = /^(api|results|sbp$)/;

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename]) =>
    MAINTAINERS.test(docname) ? score - 20 : REFERENCE.test(docname) ? score - 12 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
