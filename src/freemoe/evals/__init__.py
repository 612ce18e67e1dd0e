"""Tasks, their documents and splits, scoring, and the statistics that decide what may be claimed."""
