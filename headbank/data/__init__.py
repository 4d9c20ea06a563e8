"""Questions with candidate documents: readers for published files, and a small set of the project's own."""
