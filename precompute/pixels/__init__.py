"""Image bytes → uint8 pixels for every bucket, safe against hostile files."""
