// Draw diagrams at their natural size instead of shrinking them to the width of the page.
const natural = {
  flowchart: { useMaxWidth: false, nodeSpacing: 16, rankSpacing: 20, padding: 10 },
  sequence: { useMaxWidth: false, width: 90, actorMargin: 10, diagramMarginX: 5 },
  state: { useMaxWidth: false, nodeSpacing: 110 },  // keeps a loop's label off its neighbour
};
// The theme leaves the arrowheads of sequences dark on a dark page.
const arrowheads = "marker path { fill: var(--md-mermaid-edge-color) !important }";

const initialize = mermaid.initialize;
mermaid.initialize = (options) => {
  for (const [kind, sizes] of Object.entries(natural)) {
    options[kind] = { ...options[kind], ...sizes };
  }
  options.fontSize = 14;
  options.themeCSS += arrowheads;
  initialize.call(mermaid, options);
};
