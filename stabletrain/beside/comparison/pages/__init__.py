"""HTML pages of a comparison and of a single run. They open offline."""
