"""Shows what the other stations found: terminal tables, a picture, files. Reads data; never imports torch."""
