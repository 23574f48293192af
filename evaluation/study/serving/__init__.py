"""The web page for raters, and the server behind it."""
