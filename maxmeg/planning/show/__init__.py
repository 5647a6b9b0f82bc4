"""Plans as text, JSON, HTML and pipeline timeline."""
