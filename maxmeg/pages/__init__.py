"""HTML pages and SVG drawings that need no other file, in light and dark mode."""
