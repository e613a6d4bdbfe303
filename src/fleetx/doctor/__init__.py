"""What a maintainer would ask for, and whether what is installed works: see `examining.examine`."""
