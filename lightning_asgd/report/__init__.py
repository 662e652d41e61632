"""The report of a run: curves, pictures, and the page that shows them."""
