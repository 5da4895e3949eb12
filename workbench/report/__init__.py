"""Reports: tables, plots, timelines and the HTML page."""
