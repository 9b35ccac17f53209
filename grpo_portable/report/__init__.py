"""Run folders → pages and charts: of one run, of two, of several."""
