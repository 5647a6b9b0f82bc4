"""Plans as text, page and timeline."""
