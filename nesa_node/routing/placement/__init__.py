"""Who holds which span: plans for a set of nodes, and moves from one plan to a better one."""
