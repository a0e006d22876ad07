"""Reports: one file for each form. Each takes a `Report` and returns text; none of them adds a judgement."""
