"""Pages of HTML that open offline: of a comparison, and of one run."""
