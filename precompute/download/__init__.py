"""Download: selected rows → webdataset tars of original bytes, each checked against its own records."""
