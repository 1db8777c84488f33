"""Output for people: charts and pages, tables, terminal progress, text that is safe to print."""
