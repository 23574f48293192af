"""Selected rows → verified webdataset tars, downloaded with img2dataset."""
