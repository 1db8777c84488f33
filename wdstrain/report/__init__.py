"""Text for people: SVG charts, tables, terminal output."""
