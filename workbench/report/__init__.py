"""Tables, plots, timelines and the HTML page."""
